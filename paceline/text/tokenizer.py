"""Text to token ids and back, with the `tokenizers` package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer as Backend

from paceline.checkpoint.source import ModelFiles
from paceline.checkpoint.token_bytes import TokenBytes
from paceline.checkpoint.tokenizer_config import TokenizerConfig
from paceline.checkpoint.tokenizer_files import load_backend
from paceline.errors import PromptTooLong, context_length

_MANY_CHARS = 4096
_MANY_TOKENS = 1024
# Average tokens are shorter than this, except in runs of spaces or dashes.
_HEAD_CHARS_PER_TOKEN = 16
_SLICE_CHARS = 1 << 16


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """The tokenizer of a checkpoint: tokenizer.json, or rebuilt from a GGUF."""
    backend, config = load_backend(files)
    fallback = {name: files.config.get(f"{name}_id") for name in ("bos_token", "eos_token")}
    return Tokenizer(backend, config, fallback)


class Tokenizer:
    """A tokenizer and its special tokens. Only the detokenizer uses `backend`."""

    def __init__(
        self, backend: Backend, config: TokenizerConfig, fallback: dict[str, Any] | None = None
    ) -> None:
        # A tokenizer.json may contain truncation and padding from training.
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
        self._bytes_of = TokenBytes(backend)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) > _MANY_CHARS:
            # Only the package's batch calls release the GIL.
            return self.encode_batch([text], add_special_tokens)[0]
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_within(self, text: str, limit: int, add_special_tokens: bool = True) -> list[int]:
        """As `encode`, but raises PromptTooLong if the text has far more than `limit` tokens.

        Such a text is tokenised in slices. A few megabytes at once would take seconds and a hundred
        times their size in memory.
        """
        if len(text) > _HEAD_CHARS_PER_TOKEN * limit + _MANY_CHARS:
            count = 0
            for end in range(_SLICE_CHARS, len(text) + _SLICE_CHARS, _SLICE_CHARS):
                # Slicing changes only the tokens at the cuts, far fewer than half of them.
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
        """One token as text with its leading space; broken UTF-8 becomes U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; empty for an unknown id."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._bytes_of(token_id)
        return known

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
