"""API keys: which are valid, and what each may use. Keys are kept as hashes.

A file of keys is read again when it changes, so keys can be added and withdrawn while serving.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError, Overloaded, shown

logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # a file is looked at this often at most
_LIMITS = ("max_open", "tokens_per_minute")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


@dataclass(slots=True)
class Account:
    """One key: its limits and what it uses. None: no limit."""

    name: str
    digest: bytes
    max_open: int | None = None
    tokens_per_minute: int | None = None
    num_open: int = 0
    _credit: float = math.inf  # tokens that it may still use
    _credited_s: float = 0.0

    def continued_from(self, known: Account | None) -> Account:
        """The account that this key has, with the new limits: its open requests still count."""
        if known is None:
            return self
        known.name = self.name
        known.max_open, known.tokens_per_minute = self.max_open, self.tokens_per_minute
        return known

    def begin(self, now_s: float) -> None:
        """A request starts. Raises Overloaded if the key is at a limit."""
        if self.max_open is not None and self.num_open >= self.max_open:
            message = f"This API key has {self.num_open} open requests, which is its limit."
            raise Overloaded(f"{message} Wait for one to end.")
        if self.tokens_per_minute is not None and self._refill(now_s) <= 0.0:
            wait_s = math.ceil(-self._credit * 60 / self.tokens_per_minute) + 1
            message = f"This API key has used its {self.tokens_per_minute} tokens per minute."
            raise Overloaded(f"{message} Try again in {wait_s} s.", retry_after_s=wait_s)
        self.num_open += 1

    def end(self, num_tokens: int) -> None:
        """A request has ended. Its tokens are known only now, so the credit may fall below 0."""
        self.num_open -= 1
        self._credit -= num_tokens

    def _refill(self, now_s: float) -> float:
        rate = self.tokens_per_minute
        assert rate is not None
        gained = (now_s - self._credited_s) * rate / 60
        self._credit = min(self._credit + gained, float(rate))
        self._credited_s = now_s
        return self._credit


class ApiKeys:
    """The valid keys. Without any, every request is served."""

    def __init__(
        self,
        key: str | None = None,
        path: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._own = [] if key is None else [Account("--api-key", _digest(key.encode()))]
        self._path = None if path is None else Path(path)
        self._accounts = list(self._own)
        self._seen: tuple[int, int] | None = None
        self._looked_s = -math.inf
        if self._path is not None:
            self._read(self._path)  # raises if the file cannot be read

    @property
    def are_needed(self) -> bool:
        return bool(self._own) or self._path is not None

    def find(self, key: bytes) -> Account | None:
        """The account of a key. The time does not depend on which key it is, or on its text."""
        self._look()
        digest, found = _digest(key), None
        for account in self._accounts:
            if hmac.compare_digest(digest, account.digest):
                found = account
        return found

    def _look(self) -> None:
        """Read the file again if it has changed. A broken file changes nothing."""
        now_s = self._clock()
        if self._path is None or now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s = now_s
        try:
            stat = self._path.stat()
            if (stat.st_mtime_ns, stat.st_size) != self._seen:
                self._read(self._path)
                logger.info("%s changed: %d keys", self._path, len(self._accounts))
        except (ConfigError, OSError) as error:
            logger.error("the API keys stay as they were: %s", error)

    def _read(self, path: Path) -> None:
        try:
            stat = path.stat()
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {path} cannot be read: {error}") from None
        self._seen = (stat.st_mtime_ns, stat.st_size)
        numbered = ((n, line.strip()) for n, line in enumerate(lines, 1))
        read = [_account(line, f"{path}:{n}") for n, line in numbered if line[:1] not in ("", "#")]
        if not read and not self._own:
            raise ConfigError(f"--api-key-file {path} has no key; one line per key.")
        before = {account.digest: account for account in self._accounts}
        self._accounts = [*self._own, *(a.continued_from(before.get(a.digest)) for a in read)]


def _account(line: str, where: str) -> Account:
    """KEY [name=TEXT] [max_open=N] [tokens_per_minute=N]"""
    key, *options = line.split()
    account = Account(where, _digest(key.encode()))
    for option in options:
        name, _, value = option.partition("=")
        if name == "name" and value:
            account.name = value
        elif name in _LIMITS and value.isascii() and value.isdigit() and int(value) > 0:
            setattr(account, name, int(value))
        else:
            raise ConfigError(
                f"{where}: {shown(option)} is not an option of a key; a line is "
                "KEY [name=TEXT] [max_open=N] [tokens_per_minute=N]."
            )
    return account
