"""Loads a checkpoint's tokenizer as a `tokenizers.Tokenizer`, from tokenizer.json or from a GGUF.

paceline/text encodes and decodes with it.
"""

from __future__ import annotations

import logging
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, processors

from paceline.checkpoint import gguf_tokenizer
from paceline.checkpoint.gguf_file import GgufFile
from paceline.checkpoint.source import ModelFiles
from paceline.checkpoint.tokenizer_config import TokenizerConfig, config_of_folder, config_of_gguf
from paceline.errors import CheckpointError

logger = logging.getLogger(__name__)


def load_backend(files: ModelFiles) -> tuple[Tokenizer, TokenizerConfig]:
    """The tokenizer, which adds the begin and end tokens as the checkpoint asks."""
    if files.gguf is not None:
        return _of_gguf(files.gguf)
    config = config_of_folder(files.folder)
    tokenizer = _of_json(files.folder / "tokenizer.json")
    _add_tokens(files.folder, tokenizer, config)
    ends = _ends(tokenizer, config)
    wanted = (
        ends[0] if config.add_bos is None else config.add_bos,
        ends[1] if config.add_eos is None else config.add_eos,
    )
    if wanted != ends:  # tokenizer_config.json overrules tokenizer.json
        _set_ends(tokenizer, config, *wanted)
    return tokenizer, config


def _of_gguf(path: Path) -> tuple[Tokenizer, TokenizerConfig]:
    file = GgufFile(path)
    config = config_of_gguf(file)
    try:
        tokenizer = gguf_tokenizer.build_tokenizer(file, config)
    except CheckpointError:
        raise
    except Exception as error:  # the package raises bare Exceptions
        raise CheckpointError(f"{path}: the tokenizer cannot be built: {error}.") from None
    add_bos = gguf_tokenizer.adds_bos(file) if config.add_bos is None else config.add_bos
    _set_ends(tokenizer, config, add_bos, bool(config.add_eos))
    return tokenizer, config


def _of_json(path: Path) -> Tokenizer:
    if not path.exists():
        there = [n for n in ("tokenizer.model", "vocab.json") if (path.parent / n).exists()]
        hint = f" (transformers can make it from {there[0]}, which is there)" if there else ""
        raise CheckpointError(
            f"{path.parent} holds no tokenizer.json{hint}. Add it, give another folder with "
            "--tokenizer, or use --skip-tokenizer-init for token ids only."
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exceptions
        raise CheckpointError(f"{path} is damaged: {error}. Fetch it again.") from None


def _add_tokens(folder: Path, tokenizer: Tokenizer, config: TokenizerConfig) -> None:
    """Add tokens of tokenizer_config.json that tokenizer.json lacks."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for token_id, (text, special) in sorted(config.added.items()):
        if text in known:
            continue
        tokenizer.add_tokens([AddedToken(text, special=special, normalized=not special)])
        got = tokenizer.token_to_id(text)
        if got != token_id:
            raise CheckpointError(
                f"{folder}: tokenizer_config.json gives {text!r} the id {token_id}, in "
                f"tokenizer.json it would get {got}; the two files do not belong together."
            )
        known.add(text)
    for text in config.named.values():
        if text not in known and tokenizer.token_to_id(text) is not None:
            tokenizer.add_special_tokens([AddedToken(text, special=True)])


def _ends(tokenizer: Tokenizer, config: TokenizerConfig) -> tuple[bool, bool]:
    """Whether tokenizer.json itself adds the begin token and the end token."""
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    if len(whole) == len(plain):
        return False, False
    bos, eos = (tokenizer.token_to_id(config.named.get(n, "")) for n in ("bos_token", "eos_token"))
    return bos is not None and whole[0] == bos, eos is not None and whole[-1] == eos


def _set_ends(tokenizer: Tokenizer, config: TokenizerConfig, add_bos: bool, add_eos: bool) -> None:
    """Set whether encode adds the begin and end tokens."""
    pieces, tokens = ["$A"], {}
    for name, wanted, at in (("bos_token", add_bos, 0), ("eos_token", add_eos, 2)):
        if not wanted:
            continue
        text = config.named.get(name)
        token_id = tokenizer.token_to_id(text) if text else None
        if text is None or token_id is None:
            logger.warning("The tokenizer wants to add its %s but has none; it adds nothing.", name)
            continue
        pieces.insert(at, text)
        tokens[text] = token_id
    tokenizer.post_processor = processors.TemplateProcessing(
        single=pieces, special_tokens=list(tokens.items())
    )
