"""The bytes that each token of a vocabulary stands for, whatever the vocabulary writes for them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from tokenizers import Tokenizer as Backend

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Token id -> bytes; empty for an unknown id."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        self._byte_of_char = _byte_alphabet() if _is_byte_level(backend) else None

    def __call__(self, token_id: int) -> bytes:
        if token_id in self._added:
            return str(self._added[token_id].content).encode()
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if self._byte_of_char is not None:
            if all(char in self._byte_of_char for char in token):
                return bytes(self._byte_of_char[char] for char in token)
            return str(token).encode()
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte:
            return bytes([int(byte[1], 16)])
        return str(token).replace("\u2581", " ").encode()


def shared_tokens(target: Backend, draft: Backend) -> Iterator[tuple[int, int]]:
    """(target id, draft id) of tokens that both vocabularies have, special or not in both."""
    known: dict[tuple[bytes, bool], int] = {}
    for token, draft_id in _tokens(draft):
        known.setdefault(token, draft_id)
    for token, target_id in _tokens(target):
        # Each draft id once: of tokens that stand for the same bytes, the first.
        if (draft_id := known.pop(token, -1)) >= 0:
            yield target_id, draft_id


def _tokens(backend: Backend) -> Iterator[tuple[tuple[bytes, bool], int]]:
    """(bytes, is an added token) and id of every token, by id."""
    bytes_of, added = TokenBytes(backend), backend.get_added_tokens_decoder()
    for token_id in sorted(backend.get_vocab(with_added_tokens=True).values()):
        if text := bytes_of(token_id):
            yield (text, token_id in added), token_id


def _is_byte_level(backend: Backend) -> bool:
    if backend.decoder is None:
        return False
    state = json.loads(backend.decoder.__getstate__())
    steps = [state, *state.get("decoders", [])]
    return any(step.get("type") == "ByteLevel" for step in steps)


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte, for vocabularies that write one character per byte.

    Printable Latin-1 characters are themselves; the other bytes are written from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    table = {chr(b): b for b in printable}
    table.update({chr(0x100 + n): b for n, b in enumerate(others)})
    return table
