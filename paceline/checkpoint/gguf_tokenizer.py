"""Rebuilds a `tokenizers` tokenizer from a GGUF's vocabulary. Refuses by name what it cannot.

A GGUF contains only the name of its pre-tokenizer; the definitions are here.
"""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from paceline.checkpoint.gguf_file import GgufFile
from paceline.checkpoint.tokenizer_config import TokenizerConfig
from paceline.errors import CheckpointError

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

# The pre-tokenizer's regex. Llama 3 and Qwen2 differ only in digits.
_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
PRE_TOKENIZERS = ("smollm", *_LLAMA3_NAMES, "qwen2")
_SPACE = "\u2581"  # SentencePiece's character for a space


def build_tokenizer(file: GgufFile, config: TokenizerConfig) -> Tokenizer:
    """The tokenizer without begin and end tokens; tokenizer_files adds them."""
    kind = file.get("tokenizer.ggml.model")
    tokens = file.get("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError(f"{file.path} holds no tokenizer (tokenizer.ggml.tokens).")
    types = file.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(
            f"{file.path}: {len(tokens)} tokens and {len(types)} token types do not fit."
        )
    if kind == "gpt2":
        tokenizer = _byte_level(file, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece(file, tokens, types, config)
    else:
        raise CheckpointError(
            f"{file.path}: tokenizer model {kind!r} is not supported; supported are gpt2 and llama."
        )
    _mark_whole(tokenizer, tokens, types, set(config.named.values()))
    return tokenizer


def _mark_whole(tokenizer: Tokenizer, tokens: list[str], types: list[int], named: set[str]) -> None:
    """Mark control and user-defined tokens: they are matched in text before anything else."""
    special, plain = [], []
    for token, kind in zip(tokens, types, strict=True):
        if kind == _CONTROL or token in named:
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def adds_bos(file: GgufFile) -> bool:
    """The default for adding the begin token, if the file does not say."""
    if file.get("tokenizer.ggml.model") == "llama":
        return True
    return file.get("tokenizer.ggml.pre") in _LLAMA3_NAMES


def _byte_level(file: GgufFile, tokens: list[str]) -> Tokenizer:
    pre = file.get("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{file.path}: pre-tokenizer {pre!r} is not supported; supported are "
            f"{', '.join(PRE_TOKENIZERS)}."
        )
    tokenizer = Tokenizer(
        BPE(
            vocab=_vocabulary(tokens),
            merges=_merges(file),
            # Llama 3's vocabulary has words that no sequence of merges produces.
            ignore_merges=pre in _LLAMA3_NAMES,
        )
    )
    if pre == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    else:
        cut = _CUT.format(digits=r"\p{N}" if pre == "qwen2" else r"\p{N}{1,3}")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(cut), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(
    file: GgufFile, tokens: list[str], types: list[int], config: TokenizerConfig
) -> Tokenizer:
    if file.get("tokenizer.ggml.merges"):
        merges = _merges(file)
    else:
        scores = file.get("tokenizer.ggml.scores") or []
        if len(scores) != len(tokens):
            raise CheckpointError(
                f"{file.path}: {len(tokens)} tokens and {len(scores)} scores do not fit."
            )
        merges = merges_from_scores(tokens, scores, types)
    tokenizer = Tokenizer(
        BPE(
            vocab=_vocabulary(tokens),
            merges=merges,
            unk_token=config.named.get("unk_token"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(file.get("tokenizer.ggml.add_space_prefix", True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=_SPACE, prepend_scheme="first" if prefix else "never", split=False
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def merges_from_scores(
    tokens: list[str], scores: list[float], types: list[int]
) -> list[tuple[str, str]]:
    """Ranked merges that do what SentencePiece does: join the neighbours with the best score.

    Every division of a piece into two known pieces is a merge. Control, unknown and byte pieces are
    left out, because merging text never produces them.
    """
    ids = {
        token: i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind not in (_UNKNOWN, _CONTROL, _BYTE)
    }
    ranked = []
    for token, i in ids.items():
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[i], -cut, cut - len(token), i, left, right))
    ranked.sort()
    return [(tokens[left], tokens[right]) for *_, left, right in ranked]


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    return {token: i for i, token in enumerate(tokens)}


def _merges(file: GgufFile) -> list[tuple[str, str]]:
    merges = []
    for line in file.get("tokenizer.ggml.merges") or []:
        left, _, right = line.partition(" ")
        merges.append((left, right))
    return merges
