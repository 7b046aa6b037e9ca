"""Token ids and decoded text equal those of transformers, for tokenizer.json and for GGUF files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from paceline.checkpoint.source import ModelFiles
from paceline.checkpoint.tokenizer_config import TokenizerConfig
from paceline.errors import CheckpointError, PromptTooLong
from paceline.text.tokenizer import Tokenizer, load_tokenizer
from tests.checkpoint.gguf_writing import write_tokenizer_only
from tests.checkpoint.vocabularies import TEXTS, Vocabulary, byte_level, sentencepiece

LLAMA3_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KINDS = ("smollm", "llama-bpe", "qwen2", "spm")


def gguf_files(folder: Path, vocabulary: Vocabulary) -> ModelFiles:
    path = folder / "model.gguf"
    write_tokenizer_only(path, vocabulary)
    return ModelFiles("tiny", "gguf", folder, path, [path], {})


def hf_files(folder: Path, config: dict[str, Any] | None = None) -> ModelFiles:
    return ModelFiles("tiny", "hf", folder, None, [], config or {})


def vocabulary_of(kind: str) -> Vocabulary:
    return sentencepiece() if kind == "spm" else byte_level(kind)


def reference(kind: str) -> Any:
    """The same vocabulary in transformers, put together here and not by what is tested."""
    vocabulary = vocabulary_of(kind)
    vocab = {token: i for i, token in enumerate(vocabulary.tokens)}
    if kind == "spm":
        assert vocabulary.scores is not None
        from transformers.tokenization_utils_base import generate_merges

        scores = dict(zip(vocabulary.tokens, vocabulary.scores, strict=True))
        return transformers.LlamaTokenizer(vocab=vocab, merges=generate_merges(vocab, scores))
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    if kind == "qwen2":
        made = transformers.Qwen2Tokenizer(vocab=vocab, merges=vocabulary.merges, **special)
    else:
        made = transformers.PreTrainedTokenizerFast(
            tokenizer_object=_bpe(kind, vocab, vocabulary.merges), **special
        )
    made.add_tokens([AddedToken("<tool>", normalized=False)])
    return made


def _bpe(kind: str, vocab: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    made = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=kind == "llama-bpe"))
    made.decoder = decoders.ByteLevel()
    if kind == "smollm":
        steps = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    else:
        steps = [
            pre_tokenizers.Split(Regex(LLAMA3_CUT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return made


@pytest.fixture(scope="module", params=KINDS)
def pair(request: Any, tmp_path_factory: Any) -> tuple[Tokenizer, Any, str]:
    """(ours from a GGUF, transformers', the kind)"""
    kind = request.param
    ours = load_tokenizer(gguf_files(tmp_path_factory.mktemp(kind), vocabulary_of(kind)))
    return ours, reference(kind), kind


# A literal "<0x41>" is text to SentencePiece; transformers makes it the byte token.
def _is_comparable(kind: str, text: str) -> bool:
    return kind != "spm" or "<0x" not in text


def test_ids_equal_those_of_transformers(pair: tuple[Tokenizer, Any, str]) -> None:
    ours, theirs, kind = pair
    for text in TEXTS:
        if _is_comparable(kind, text):
            expected = theirs.encode(text, add_special_tokens=False)
            assert ours.encode(text, add_special_tokens=False) == expected, text


def test_decoded_text_equals_that_of_transformers(pair: tuple[Tokenizer, Any, str]) -> None:
    ours, theirs, _ = pair
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40))
def test_ids_of_any_text_equal_those_of_transformers(
    pair: tuple[Tokenizer, Any, str], text: str
) -> None:
    ours, theirs, kind = pair
    if _is_comparable(kind, text):
        expected = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == expected


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_text_survives_encoding_and_decoding(pair: tuple[Tokenizer, Any, str], text: str) -> None:
    ours, _, kind = pair
    decoded = ours.decode(ours.encode(text, add_special_tokens=False), skip_special_tokens=False)
    if kind == "spm":  # the prefix space takes the place of a first space, and ▁ is a space
        assert decoded in (text.replace("\u2581", " "), text.replace("\u2581", " ")[1:])
    elif kind == "qwen2":
        assert decoded == normalizers.NFC().normalize_str(text)
    else:
        assert decoded == text


@pytest.mark.parametrize("kind", ["llama-bpe", "qwen2", "spm"])
def test_transformers_reads_the_same_ids_from_the_same_gguf(tmp_path: Path, kind: str) -> None:
    files = gguf_files(tmp_path, vocabulary_of(kind))
    ours = load_tokenizer(files)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    for text in TEXTS:
        # transformers gives a GGUF neither Qwen's normalisation nor Llama 3's whole words
        if not _is_comparable(kind, text) or "\u0301" in text or "unreachable" in text:
            continue
        expected = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == expected, text


def test_llama_3_takes_whole_words_that_its_merges_do_not_reach(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(gguf_files(tmp_path, byte_level("llama-bpe")))
    word = byte_level("llama-bpe").tokens.index("unreachable")
    assert tokenizer.encode("unreachable", add_special_tokens=False) == [word]
    (tmp_path / "other").mkdir()
    other = load_tokenizer(gguf_files(tmp_path / "other", byte_level("qwen2")))
    assert len(other.encode("unreachable", add_special_tokens=False)) > 1


@pytest.mark.parametrize(
    ("kind", "flags", "ends"),
    [
        ("smollm", {}, (False, False)),
        ("qwen2", {}, (False, False)),
        ("llama-bpe", {}, (True, False)),
        ("spm", {}, (True, False)),
        ("smollm", {"add_bos_token": True}, (True, False)),
        ("spm", {"add_bos_token": False}, (False, False)),
        ("llama-bpe", {"add_bos_token": False, "add_eos_token": True}, (False, True)),
        ("spm", {"add_bos_token": True, "add_eos_token": True}, (True, True)),
    ],
)
def test_begin_and_end_tokens_are_added_as_the_file_says(
    tmp_path: Path, kind: str, flags: dict[str, bool], ends: tuple[bool, bool]
) -> None:
    vocabulary = dataclasses.replace(vocabulary_of(kind), flags=flags)
    tokenizer = load_tokenizer(gguf_files(tmp_path, vocabulary))
    plain = tokenizer.encode("Hello", add_special_tokens=False)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert (bos, eos) == (vocabulary.special["bos"], vocabulary.special["eos"])
    expected = [bos] * ends[0] + plain + [eos] * ends[1]
    assert tokenizer.encode("Hello") == expected
    assert tokenizer.encode_batch(["Hello", "Hello"]) == [expected, expected]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "t5"}, "tokenizer model 't5' is not supported"),
        ({"model": "bert"}, "tokenizer model 'bert' is not supported"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken' is not supported"),
        ({"pre": "default"}, "pre-tokenizer 'default' is not supported"),
        ({"pre": None}, "pre-tokenizer None is not supported"),
        ({"special": {"bos": 10_000}}, "bos_token_id is 10000"),
    ],
)
def test_a_tokenizer_that_we_cannot_rebuild_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    vocabulary = dataclasses.replace(byte_level("smollm"), **changes)
    with pytest.raises(CheckpointError, match=named):
        load_tokenizer(gguf_files(tmp_path, vocabulary))


def test_a_gguf_without_a_prefix_space_adds_none(tmp_path: Path) -> None:
    vocabulary = dataclasses.replace(sentencepiece(), flags={"add_space_prefix": False})
    tokenizer = load_tokenizer(gguf_files(tmp_path, vocabulary))
    ids = tokenizer.encode("the the", add_special_tokens=False)
    assert tokenizer.token_bytes(ids[0])[:1] == b"t"
    assert tokenizer.decode(ids) == "the the"


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_tokenizer_is_read_with_the_same_ids(tmp_path: Path, kind: str) -> None:
    theirs = reference(kind)
    theirs.save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(hf_files(tmp_path))
    for text in TEXTS:
        for special in (True, False):
            expected = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == expected, text
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.special_ids >= set(theirs.all_special_ids) - {theirs.unk_token_id}


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(
    "flags",
    [(True, True), (True, False), (False, True), (False, False), (True, None), (None, None)],
)
def test_the_flags_of_tokenizer_config_json_overrule_tokenizer_json(
    tmp_path: Path, flags: tuple[bool | None, bool | None], given: bool
) -> None:
    made = reference("llama-bpe")
    bos, eos = made.bos_token_id, made.eos_token_id
    if given:  # tokenizer.json itself adds both
        made.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|im_start|> $A <|im_end|>",
            special_tokens=[("<|im_start|>", bos), ("<|im_end|>", eos)],
        )
    made.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.update(add_bos_token=flags[0], add_eos_token=flags[1])
    path.write_text(json.dumps(config))
    ours = load_tokenizer(hf_files(tmp_path))
    wanted = [given if flag is None else flag for flag in flags]
    plain = ours.encode("Hello", add_special_tokens=False)
    assert ours.encode("Hello") == [bos] * wanted[0] + plain + [eos] * wanted[1]


def test_a_post_processor_is_kept_when_no_flag_speaks_against_it(tmp_path: Path) -> None:
    made = _bpe("smollm", {t: i for i, t in enumerate(byte_level("smollm").tokens)}, [])
    made.add_special_tokens(["<|im_start|>"])
    bos = made.token_to_id("<|im_start|>")
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(hf_files(tmp_path, {"bos_token_id": bos, "eos_token_id": [5, 6]}))
    assert tokenizer.encode("a")[0] == bos
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (bos, 5)
    assert tokenizer.named_tokens["bos_token"] == "<|im_start|>"


def test_truncation_and_padding_of_a_training_setup_are_dropped(tmp_path: Path) -> None:
    made = _bpe("smollm", {t: i for i, t in enumerate(byte_level("smollm").tokens)}, [])
    made.enable_truncation(4)
    made.enable_padding(length=4)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(hf_files(tmp_path))
    assert len(tokenizer.encode("abcdefgh")) == 8
    assert len(tokenizer.encode("a")) == 1


def test_tokens_of_tokenizer_config_json_alone_are_added_at_their_ids(tmp_path: Path) -> None:
    made = _bpe("smollm", {"a": 0, "b": 1, "<e>": 2}, [])
    made.save(str(tmp_path / "tokenizer.json"))
    config: dict[str, Any] = {
        "eos_token": "<e>",
        "added_tokens_decoder": {"3": {"content": "<x>", "special": True}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(hf_files(tmp_path))
    assert tokenizer.encode("a<x>b<e>") == [0, 3, 1, 2]
    assert tokenizer.special_ids == {2, 3}
    assert tokenizer.decode([0, 3, 1, 2]) == "ab"
    config["added_tokens_decoder"] = {"7": {"content": "<y>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="the id 7"):
        load_tokenizer(hf_files(tmp_path))


def test_special_tokens_map_json_names_tokens_too(tmp_path: Path) -> None:
    _bpe("smollm", {"a": 0, "<e>": 1}, []).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<e>"}}')
    assert load_tokenizer(hf_files(tmp_path)).eos_token_id == 1


def test_a_missing_or_damaged_tokenizer_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json\. Add it"):
        load_tokenizer(hf_files(tmp_path))
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(CheckpointError, match=r"make it from tokenizer\.model"):
        load_tokenizer(hf_files(tmp_path))
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is damaged"):
        load_tokenizer(hf_files(tmp_path))


def test_the_bytes_of_tokens_joined_are_the_bytes_of_the_text(
    pair: tuple[Tokenizer, Any, str],
) -> None:
    ours, _, kind = pair
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False)
        joined = b"".join(ours.token_bytes(i) for i in ids)
        if kind == "qwen2":
            text = normalizers.NFC().normalize_str(text)
        if kind == "spm":
            text = text.replace("\u2581", " ")
            joined = joined[len(joined) - len(text.encode()) :]
        assert joined == text.encode()


def test_one_token_as_text(pair: tuple[Tokenizer, Any, str]) -> None:
    ours, _, kind = pair
    ids = ours.encode("the the", add_special_tokens=False)
    assert ours.token_text(ids[-1]) == " the"
    if kind != "spm":
        assert ours.token_text(vocabulary_of(kind).special["eos"]) == "<|im_end|>"
    assert ours.token_bytes(ours.vocab_size + 5) == b""
    assert ours.token_bytes(-1) == b""
    half = ours.encode("€", add_special_tokens=False)
    if len(half) > 1:
        assert "\ufffd" in ours.token_text(half[-1])


def test_a_long_text_has_the_same_ids_as_in_one_go(pair: tuple[Tokenizer, Any, str]) -> None:
    ours, _, _ = pair
    text = " ".join(TEXTS) * 20
    assert ours.encode(text) == list(ours.backend.encode(text).ids)
    assert ours.encode_within(text, len(text)) == ours.encode(text)
    ids = ours.encode(text)
    assert ours.decode(ids) == ours.backend.decode(ids)


def test_a_text_far_beyond_the_limit_is_refused_by_its_beginning(
    pair: tuple[Tokenizer, Any, str],
) -> None:
    """Ten megabytes would take many seconds and a gigabyte of memory to encode."""
    ours, _, _ = pair
    for text in ("x1 " * 3_000_000, "日本" * 3_000_000):
        with pytest.raises(PromptTooLong, match=f"has {len(text)} characters, the first 65536 of"):
            ours.encode_within(text, 100)


def test_a_text_of_few_tokens_that_goes_on_with_many_is_never_encoded_at_once(
    pair: tuple[Tokenizer, Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, _, _ = pair
    longest = [0]
    encode = Tokenizer.encode

    def watched(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        longest.append(len(text))
        is_blank = not text.strip()  # as if one token stood for any run of spaces
        return [0] if is_blank else encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    with pytest.raises(PromptTooLong):
        ours.encode_within(" " * 200_000 + "x1 " * 3_000_000, 100)
    assert max(longest) <= 1 << 16


def test_a_text_of_few_long_tokens_is_encoded_however_long_it_is() -> None:
    vocab = {"-" * 1000: 0, "?": 1}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ours = Tokenizer(backend, TokenizerConfig())
    text = " ".join(["-" * 1000] * 150)
    assert ours.encode_within(text, 100) == [0] * 150
