"""Text to token ids and back, over the `tokenizers` package. Knows no chat and no streaming."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer as Backend

from paceline.checkpoint.source import ModelFiles
from paceline.checkpoint.tokenizer_config import TokenizerConfig
from paceline.checkpoint.tokenizer_files import load_backend
from paceline.errors import PromptTooLong, context_length

_MANY_CHARS = 4096
_MANY_TOKENS = 1024
# Tokens are shorter than this in any text that is not made of spaces or dashes alone.
_HEAD_CHARS_PER_TOKEN = 16
_SLICE_CHARS = 1 << 16
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """The tokenizer of a checkpoint: tokenizer.json, or rebuilt from a GGUF."""
    backend, config = load_backend(files)
    fallback = {name: files.config.get(f"{name}_id") for name in ("bos_token", "eos_token")}
    return Tokenizer(backend, config, fallback)


class Tokenizer:
    """What the rest of Paceline knows of a tokenizer. `backend` is for the detokenizer."""

    def __init__(
        self, backend: Backend, config: TokenizerConfig, fallback: dict[str, Any] | None = None
    ) -> None:
        # A tokenizer.json may have been saved with limits of its training set-up.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.named_tokens = dict(config.named)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._id_of("bos_token", fallback)
        self.eos_token_id = self._id_of("eos_token", fallback)
        self._added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self._bytes: dict[int, bytes] = {}
        self._byte_of_char = _byte_alphabet() if _is_byte_level(backend) else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) > _MANY_CHARS:
            # Only the package's batch calls let other threads run: streams, in a server.
            return self.encode_batch([text], add_special_tokens)[0]
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_within(self, text: str, limit: int, add_special_tokens: bool = True) -> list[int]:
        """As `encode`, but a text of far more than `limit` tokens is refused by counting in slices.

        A few megabytes at once would take seconds and a hundred times their size in memory.
        """
        if len(text) > _HEAD_CHARS_PER_TOKEN * limit + _MANY_CHARS:
            count = 0
            for end in range(_SLICE_CHARS, len(text) + _SLICE_CHARS, _SLICE_CHARS):
                # Cutting may change the tokens next to the cut, never half of them.
                count += len(self.encode(text[end - _SLICE_CHARS : end], add_special_tokens))
                if count > 2 * limit:
                    raise PromptTooLong(
                        f"{context_length(limit)} The prompt has {len(text)} characters, the first "
                        f"{min(end, len(text))} of which are {count} tokens. Shorten it or raise "
                        "--max-model-len.",
                        param="prompt",
                    )
        return self.encode(text, add_special_tokens)

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        encoded = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [list(e.ids) for e in encoded]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        ids = list(ids)
        if len(ids) > _MANY_TOKENS:  # as in `encode`
            return str(self.backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0])
        return str(self.backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """One token as text, its leading space kept; a broken UTF-8 piece shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token stands for; empty for an id that the tokenizer does not know."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._make_bytes(token_id)
        return known

    def _make_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].content.encode()
        token = self.backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if self._byte_of_char is not None:
            if all(char in self._byte_of_char for char in token):
                return bytes(self._byte_of_char[char] for char in token)
            return token.encode()
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte:
            return bytes([int(byte[1], 16)])
        return token.replace("\u2581", " ").encode()

    def _id_of(self, name: str, fallback: dict[str, Any] | None) -> int | None:
        text = self.named_tokens.get(name)
        if text is not None:
            found: int | None = self.backend.token_to_id(text)
            if found is not None:
                return found
        given = (fallback or {}).get(name)
        if isinstance(given, list):
            given = given[0] if given else None
        if given is None:
            return None
        token = self.backend.id_to_token(int(given))
        if token is not None:
            self.named_tokens.setdefault(name, token)
        return int(given)


def _is_byte_level(backend: Backend) -> bool:
    if backend.decoder is None:
        return False
    state = json.loads(backend.decoder.__getstate__())
    steps = [state, *state.get("decoders", [])]
    return any(step.get("type") == "ByteLevel" for step in steps)


def _byte_alphabet() -> dict[str, int]:
    """The character that byte-level vocabularies write for each byte, the other way round.

    Printable Latin-1 stands for itself; the other bytes take the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    table = {chr(b): b for b in printable}
    table.update({chr(0x100 + n): b for n, b in enumerate(others)})
    return table
