"""However tokens are grouped into pushes, the same text comes out, and stop strings never show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.checkpoint.source import ModelFiles
from paceline.text.detokenizer import Detokenizer, TextDelta
from paceline.text.tokenizer import Tokenizer, load_tokenizer
from tests.checkpoint.gguf_writing import write_tokenizer_only
from tests.checkpoint.vocabularies import TEXTS, byte_level, sentencepiece

STOPS = st.lists(st.text("ab\n €é", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


def load(folder: Path, vocabulary: Any) -> Tokenizer:
    path = folder / "model.gguf"
    write_tokenizer_only(path, vocabulary)
    return load_tokenizer(ModelFiles("tiny", "gguf", folder, path, [path], {}))


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: Any) -> Tokenizer:
    return load(tmp_path_factory.mktemp("bytes"), byte_level("smollm"))


@pytest.fixture(scope="module")
def piece_tokenizer(tmp_path_factory: Any) -> Tokenizer:
    return load(tmp_path_factory.mktemp("pieces"), sentencepiece())


@pytest.fixture(params=["bytes", "pieces"])
def tokenizer(request: Any, byte_tokenizer: Tokenizer, piece_tokenizer: Tokenizer) -> Tokenizer:
    return byte_tokenizer if request.param == "bytes" else piece_tokenizer


def chunks(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """`ids` cut into groups of the given sizes, again and again."""
    groups, at, turn = [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        groups.append(ids[at : at + size])
        at, turn = at + size, turn + 1
    return groups


def run(detokenizer: Detokenizer, groups: list[list[int]]) -> TextDelta:
    """All groups pushed, as the engine does: nothing more once a stop string was found."""
    text, count = "", 0
    for group in groups:
        delta = detokenizer.push(group, False)
        text += delta.text
        count += delta.num_tokens
        if delta.stop is not None:
            return TextDelta(text, count, delta.stop)
    delta = detokenizer.push([], True)
    return TextDelta(text + delta.text, count + delta.num_tokens, delta.stop)


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The text that each token completes; the last entry is what the end adds."""
    detokenizer = Detokenizer(tokenizer, prompt_ids=[])
    shown = [detokenizer.push([i], False).text for i in ids]
    return [*shown, detokenizer.push([], True).text]


def first_stop(
    parts: list[str], stop: tuple[str, ...], include: bool, min_tokens: int
) -> TextDelta:
    """By brute force: the text character by character, each with the token it belongs to."""
    num_tokens = len(parts) - 1
    text = ""
    for index, part in enumerate(parts):
        count = min(index + 1, num_tokens)
        for char in part:
            text += char
            found = [s for s in stop if text.endswith(s)]
            if found and count >= min_tokens:
                longest = max(found, key=len)
                kept = text if include else text[: -len(longest)]
                return TextDelta(kept, count, longest)
    return TextDelta(text, num_tokens, None)


def test_text_comes_out_whole_and_equal_to_a_full_decode(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        for sizes in ([1], [2], [3, 1], [100]):
            detokenizer = Detokenizer(tokenizer, prompt_ids=[])
            shown = [detokenizer.push(group, False).text for group in chunks(ids, sizes)]
            shown.append(detokenizer.push([], True).text)
            assert "".join(shown) == tokenizer.decode(ids), text
            assert not any("\ufffd" in piece for piece in shown), text


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_tokens_in_any_groups_give_the_same_text(
    byte_tokenizer: Tokenizer, piece_tokenizer: Tokenizer, data: st.DataObject
) -> None:
    tokenizer = data.draw(st.sampled_from([byte_tokenizer, piece_tokenizer]))
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    skip = data.draw(st.booleans())
    whole = run(Detokenizer(tokenizer, prompt_ids=[], skip_special_tokens=skip), [ids])
    cut = run(Detokenizer(tokenizer, prompt_ids=[], skip_special_tokens=skip), chunks(ids, sizes))
    assert whole == cut
    if tokenizer is byte_tokenizer:  # broken UTF-8 too
        assert whole.text == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(raw=st.binary(max_size=60), sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_broken_utf8_of_single_bytes_decodes_as_a_whole_would(
    byte_tokenizer: Tokenizer, raw: bytes, sizes: list[int]
) -> None:
    id_of = {byte_tokenizer.token_bytes(i): i for i in range(byte_tokenizer.vocab_size)}
    ids = [id_of[bytes([b])] for b in raw]
    text = run(Detokenizer(byte_tokenizer, prompt_ids=[]), chunks(ids, sizes)).text
    assert text == raw.decode("utf-8", "replace")


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_stop_strings_cut_where_brute_force_cuts(
    byte_tokenizer: Tokenizer, piece_tokenizer: Tokenizer, data: st.DataObject
) -> None:
    tokenizer = data.draw(st.sampled_from([byte_tokenizer, piece_tokenizer]))
    text = data.draw(st.text("ab\n €é", max_size=30))
    ids = tokenizer.encode(text, add_special_tokens=False)
    stop = data.draw(STOPS)
    include = data.draw(st.booleans())
    min_tokens = data.draw(st.integers(0, 8))
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    detokenizer = Detokenizer(
        tokenizer, prompt_ids=[], stop=stop, include_stop=include, min_tokens=min_tokens
    )
    expected = first_stop(pieces(tokenizer, ids), stop, include, min_tokens)
    assert run(detokenizer, chunks(ids, sizes)) == expected


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab\n é", max_size=30), stop=STOPS)
def test_only_what_may_become_a_stop_string_is_held_back(
    byte_tokenizer: Tokenizer, text: str, stop: tuple[str, ...]
) -> None:
    ids = byte_tokenizer.encode(text, add_special_tokens=False)
    parts = pieces(byte_tokenizer, ids)
    detokenizer = Detokenizer(byte_tokenizer, prompt_ids=[], stop=stop)
    shown = seen = ""
    for token_id, part in zip(ids, parts, strict=False):
        delta = detokenizer.push([token_id], False)
        shown += delta.text
        seen += part
        if delta.stop is not None:
            break
        prefixes = {s[:n] for s in stop for n in range(1, len(s))}
        held = max((len(p) for p in prefixes if seen.endswith(p)), default=0)
        assert shown == seen[: len(seen) - held]
    assert not any(s in shown for s in stop)


def test_tokens_behind_a_stop_string_do_not_count(byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode("hello world", add_special_tokens=False)
    parts = pieces(byte_tokenizer, ids)
    stop = parts[1]
    detokenizer = Detokenizer(byte_tokenizer, prompt_ids=[], stop=(stop,))
    assert detokenizer.push(ids, True) == TextDelta(parts[0], 2, stop)
    assert detokenizer.push(ids, False) == TextDelta("", 0, stop)


def test_a_stop_string_over_two_pushes_is_cut_and_can_be_shown(byte_tokenizer: Tokenizer) -> None:
    first = byte_tokenizer.encode("a<<", add_special_tokens=False)
    second = byte_tokenizer.encode(">>b", add_special_tokens=False)
    for include, expected in ((False, "a"), (True, "a<<>>")):
        detokenizer = Detokenizer(
            byte_tokenizer, prompt_ids=[], stop=("<<>>",), include_stop=include
        )
        got = [detokenizer.push(ids, False) for ids in (first, second)]
        assert "".join(d.text for d in got) == expected
        assert got[1].stop == "<<>>"


def test_held_text_is_released_when_the_request_ends(byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode("a STO", add_special_tokens=False)
    detokenizer = Detokenizer(byte_tokenizer, prompt_ids=[], stop=("STOP",))
    assert detokenizer.push(ids, False).text == "a "
    assert detokenizer.push([], True) == TextDelta("STO", 0, None)


@pytest.mark.trap("E11")
def test_a_stop_string_before_min_tokens_does_not_stop(byte_tokenizer: Tokenizer) -> None:
    ids = [byte_tokenizer.encode(c, add_special_tokens=False)[0] for c in "aXbXcX"]
    for min_tokens, shown, count in ((0, "a", 2), (2, "a", 2), (3, "aXb", 4), (6, "aXbXc", 6)):
        detokenizer = Detokenizer(byte_tokenizer, prompt_ids=[], stop=("X",), min_tokens=min_tokens)
        assert detokenizer.push(ids, True) == TextDelta(shown, count, "X")
    detokenizer = Detokenizer(byte_tokenizer, prompt_ids=[], stop=("X",), min_tokens=7)
    assert detokenizer.push(ids, True) == TextDelta("aXbXcX", 6, None)


def test_special_tokens_are_skipped_or_shown(byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode("a<|im_end|>b<tool>", add_special_tokens=False)
    for skip, expected in ((True, "ab<tool>"), (False, "a<|im_end|>b<tool>")):
        detokenizer = Detokenizer(byte_tokenizer, prompt_ids=[], skip_special_tokens=skip)
        assert detokenizer.push(ids, True).text == expected


def test_a_shown_special_token_can_be_a_stop_string(byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode("a<|im_end|>b", add_special_tokens=False)
    detokenizer = Detokenizer(
        byte_tokenizer, prompt_ids=[], stop=("<|im_end|>",), skip_special_tokens=False
    )
    assert detokenizer.push(ids, True) == TextDelta("a", 2, "<|im_end|>")


def test_the_first_token_keeps_its_space_behind_a_prompt(piece_tokenizer: Tokenizer) -> None:
    prompt = piece_tokenizer.encode("the")
    answer = piece_tokenizer.encode("the the", add_special_tokens=False)[1:]
    assert Detokenizer(piece_tokenizer, prompt_ids=prompt).push(answer, True).text == " the"
    assert Detokenizer(piece_tokenizer, prompt_ids=[]).push(answer, True).text == "the"


@settings(max_examples=300, deadline=None)
@given(text=st.text("ab é東😀", min_size=1, max_size=12), cut=st.integers(0, 30))
@example(text="aa東 😀😀😀", cut=8)
@example(text="😀😀😀😀😀😀", cut=18)
def test_prompt_and_output_together_decode_to_the_text(
    byte_tokenizer: Tokenizer, piece_tokenizer: Tokenizer, text: str, cut: int
) -> None:
    for tokenizer in (byte_tokenizer, piece_tokenizer):
        ids = tokenizer.encode(text, add_special_tokens=False)
        prompt, output = ids[:cut], ids[cut:]
        shown = Detokenizer(tokenizer, prompt_ids=prompt).push(output, True).text
        if not output:
            assert shown == ""
            continue
        whole = tokenizer.decode(ids)
        # A character that the prompt begins and the output completes belongs to the output.
        assert whole == tokenizer.decode(prompt).rstrip("\ufffd") + shown


def test_a_long_run_of_broken_utf8_costs_no_more_per_token(
    byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    id_of = {byte_tokenizer.token_bytes(i): i for i in range(byte_tokenizer.vocab_size)}
    ids = [id_of[b"\xe2"]] * 4000
    detokenizer = Detokenizer(byte_tokenizer, prompt_ids=[])
    num_decoded, most_pending = 0, 0
    decode = byte_tokenizer.decode

    def counted(some: list[int], skip_special: bool = True) -> str:
        nonlocal num_decoded
        num_decoded += len(some)
        return decode(some, skip_special)

    monkeypatch.setattr(byte_tokenizer, "decode", counted)
    shown = ""
    for token_id in ids:
        shown += detokenizer.push([token_id], False).text
        most_pending = max(most_pending, len(detokenizer._pending))
    # The stream decodes what is pending for every token, and so does whoever shortens it.
    assert most_pending < 100
    assert num_decoded < 100 * len(ids)
    assert len(shown) > 3900
    assert shown + detokenizer.push([], True).text == "\ufffd" * 4000


@pytest.mark.parametrize("broken", [b"\xff", b"\xe2\x82", b"\xe2\x82\xac\xff", b"\xff" * 40])
def test_the_token_behind_broken_bytes_keeps_its_space(
    piece_tokenizer: Tokenizer, broken: bytes
) -> None:
    word = piece_tokenizer.encode("the the", add_special_tokens=False)[-1]
    first = piece_tokenizer.backend.token_to_id("<0x00>")
    assert first is not None
    ids = [word, *(first + b for b in broken), word, word]
    for size in (1, 3, 100):
        shown = run(Detokenizer(piece_tokenizer, prompt_ids=[]), chunks(ids, [size])).text
        assert shown.startswith("the")
        assert shown.endswith("\ufffd the the")


def test_the_token_behind_many_special_tokens_keeps_its_space(piece_tokenizer: Tokenizer) -> None:
    word = piece_tokenizer.encode("the the", add_special_tokens=False)[-1]
    ids = [word, *[2] * 50, word]
    assert run(Detokenizer(piece_tokenizer, prompt_ids=[]), chunks(ids, [1])).text == "the the"


def test_ids_that_the_tokenizer_does_not_know_have_no_text(byte_tokenizer: Tokenizer) -> None:
    ids = [*byte_tokenizer.encode("a"), byte_tokenizer.vocab_size + 9, *byte_tokenizer.encode("b")]
    assert Detokenizer(byte_tokenizer, prompt_ids=ids).push(ids, True).text == "ab"
