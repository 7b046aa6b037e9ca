"""Grammars as token constraints: masks, forced tokens, ends, limits and compiling."""

from __future__ import annotations

import json
import random
import re
import threading
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest

from paceline.checkpoint.source import locate
from paceline.engine import grammars as grammars_module
from paceline.engine.front import load_front
from paceline.engine.grammar_constraint import GrammarConstraint, GrammarFailed
from paceline.engine.grammar_text import MAX_DEPTH, MAX_SOURCE_BYTES, grammar_text
from paceline.engine.grammars import Grammars
from paceline.errors import CheckpointError, InvalidGrammar, InvalidRequest, MissingExtra
from paceline.request import EngineRequest, SamplingParams, StructuredOutputsParams
from paceline.text.tokenizer import Tokenizer
from tests.engine.grammar_driving import (
    EOS,
    allowed,
    generate,
    grammars_of,
    outcomes,
    params,
    tiny_tokenizer,
)
from tests.patience import wait_for

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
KINDS = [
    params(json=PERSON),
    params(json=PERSON, disable_any_whitespace=True),
    params(json=json.dumps(PERSON), whitespace_pattern=" "),
    params(json_object=True),
    params(regex="(ab|abc|abd){2,4}[0-9]{1,3}"),
    params(choice=["red", "green", "re", 'a "quoted" \\ line\n', "é日"]),
    params(grammar='start: "x" rest\nrest: "y" | "(" rest ")"'),
    params(grammar='root ::= "yes" | "no"'),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return grammars_of(tokenizer)


@pytest.fixture(scope="module")
def real() -> tuple[Tokenizer, Grammars]:
    """The default model's tokenizer of 49,152 tokens."""
    from paceline.config import EngineConfig

    try:
        locate("")
    except CheckpointError as error:
        pytest.skip(f"the default model cannot be fetched here: {error}")
    config = EngineConfig.from_keywords(model="")
    front = load_front(config)
    assert front.tokenizer is not None
    return front.tokenizer, Grammars(config, front.tokenizer.vocab_size)


def request(uid: int, **fields: Any) -> EngineRequest:
    return EngineRequest(uid, [5], SamplingParams(structured_outputs=params(**fields)))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
@pytest.mark.trap("I26", "I27")
def test_masks_with_drafts_equal_masks_token_by_token(
    grammars: Grammars, tokenizer: Tokenizer, kind: StructuredOutputsParams
) -> None:
    """Also where the grammar ends inside the window, and with drafts that it forbids."""
    rng = random.Random(7)
    for _ in range(6):
        tokens, _ = generate(grammars.constraint(kind), rng, tokenizer, 60)
        windowed, stepped = grammars.constraint(kind), grammars.constraint(kind)
        at = 0
        while at < len(tokens):
            drafts = tokens[at : at + rng.randrange(8)]
            wrong = rng.randrange(len(drafts) + 1)
            forbidden = None
            rows = windowed.masks(drafts)
            for j, draft in enumerate(drafts):
                expected = stepped.masks([])[0]
                assert np.array_equal(rows[j], expected)
                if j == wrong:
                    forbidden = next(t for t in range(300) if t not in allowed(expected))
                stepped.accept([draft])
            assert np.array_equal(rows[-1], stepped.masks([])[0])
            if forbidden is not None:
                cut = [*drafts[:wrong], forbidden, EOS, 9]
                assert np.array_equal(windowed.masks(cut)[: wrong + 1], rows[: wrong + 1])
            windowed.accept(drafts)
            at += max(1, len(drafts))
            if not drafts:
                windowed.accept(tokens[at - 1 : at])
                stepped.accept(tokens[at - 1 : at])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_forced_tokens_are_what_the_masks_leave(
    grammars: Grammars, tokenizer: Tokenizer, kind: StructuredOutputsParams
) -> None:
    rng, count = random.Random(3), 0
    for _ in range(6):
        constraint = grammars.constraint(kind)
        tokens, ended = generate(grammars.constraint(kind), rng, tokenizer, 200)
        for token in tokens:
            before = constraint.masks([])
            forced = constraint.forced()
            assert np.array_equal(constraint.masks([]), before), "forced() changed the state"
            for j, mask_V in enumerate(constraint.masks(forced)[: len(forced)]):
                assert allowed(mask_V) == [forced[j]]
            count += len(forced)
            constraint.accept([token])
        assert not (ended and constraint.forced())
    assert count > 0 or kind.kind == "json_object"


def test_the_real_tokenizer_forces_whole_words(real: tuple[Tokenizer, Grammars]) -> None:
    tokenizer, grammars = real
    constraint = grammars.constraint(params(json=PERSON, disable_any_whitespace=True))
    assert tokenizer.decode(constraint.forced()) == '{"name'
    constraint.accept(tokenizer.encode('{"name":"Al","'))
    assert tokenizer.decode(constraint.forced()) == 'age":'
    assert allowed(constraint.masks([])[0]) == constraint.forced()[:1]
    done = grammars.constraint(params(choice=["yes"]))
    assert done.forced() == [*tokenizer.encode("yes"), EOS], "the end is forced too"


def test_outputs_are_valid_with_the_real_tokenizer(real: tuple[Tokenizer, Grammars]) -> None:
    tokenizer, grammars = real
    rng = random.Random(1)
    for _ in range(20):
        tokens, ended = generate(grammars.constraint(params(json=PERSON)), rng, tokenizer)
        assert ended
        jsonschema.validate(json.loads(tokenizer.decode(tokens)), PERSON)


def test_outputs_match_a_regex_and_a_choice(grammars: Grammars, tokenizer: Tokenizer) -> None:
    rng, seen = random.Random(5), set()
    for _ in range(30):
        tokens, ended = generate(grammars.constraint(KINDS[4]), rng, tokenizer)
        assert ended
        assert re.fullmatch(KINDS[4].regex or "", tokenizer.decode(tokens))
        tokens, ended = generate(grammars.constraint(KINDS[5]), rng, tokenizer)
        assert ended
        seen.add(tokenizer.decode(tokens))
    assert seen == set(KINDS[5].choice or ())


@pytest.mark.parametrize("in_a_tag", [False, True])
def test_digits_and_letters_of_a_regex_are_ascii(
    grammars: Grammars, tokenizer: Tokenizer, in_a_tag: bool
) -> None:
    regex = r"\d{2}[\d.]\w{2}[^\W_][^\D1-9]"
    tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": regex}}
    kind = params(structural_tag=tag) if in_a_tag else params(regex=regex)
    for seed in range(20):
        tokens, _ = generate(grammars.constraint(kind), random.Random(seed), tokenizer)
        assert re.fullmatch(regex, tokenizer.decode(tokens), re.ASCII)


def test_the_end_token_is_allowed_exactly_where_the_grammar_may_end(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    constraint = grammars.constraint(params(regex="(ab)+"))
    for text, may_end in (("a", False), ("b", True), ("a", False), ("b", True)):
        constraint.accept(tokenizer.encode(text))
        assert (EOS in allowed(constraint.masks([])[0])) is may_end
    constraint.accept([EOS])
    # Under ignore_eos the request goes on, with end tokens only.
    assert [allowed(row) for row in constraint.masks([EOS, EOS])] == [[EOS]] * 3
    constraint.accept([EOS, EOS])
    assert constraint.forced() == []


def test_rows_after_a_drafted_end_allow_the_end_only(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    constraint = grammars.constraint(params(choice=["ab"]))
    drafts = [*tokenizer.encode("ab"), EOS, EOS, 9]
    rows = [allowed(row) for row in constraint.masks(drafts)]
    assert rows[-4:] == [[EOS]] * 4


def test_tokens_that_the_tokenizer_lacks_are_never_allowed(tokenizer: Tokenizer) -> None:
    padded = grammars_of(tokenizer, vocab_size=tokenizer.vocab_size + 70)
    constraint = padded.constraint(params(regex="(?s:.*)"))
    assert max(allowed(constraint.masks([])[0])) < tokenizer.vocab_size
    assert constraint.masks([5]).shape == (2, (tokenizer.vocab_size + 70 + 31) // 32)


def test_a_model_may_have_fewer_tokens_than_its_tokenizer(tokenizer: Tokenizer) -> None:
    short = grammars_of(tokenizer, vocab_size=260)
    constraint = short.constraint(params(regex="[a-z]+"))
    whole = grammars_of(tokenizer).constraint(params(regex="[a-z]+"))
    drafts = tokenizer.encode("a")
    for ours, theirs in zip(constraint.masks(drafts), whole.masks(drafts), strict=True):
        assert [t for t in allowed(ours) if t < 260] == [t for t in allowed(theirs) if t < 260]


def test_several_end_tokens_leave_the_choice_to_the_model(tokenizer: Tokenizer) -> None:
    constraint = grammars_of(tokenizer, eos=(0, EOS)).constraint(params(choice=["ab"]))
    forced = constraint.forced()
    assert tokenizer.decode(forced) == "ab"
    constraint.accept(forced)
    assert allowed(constraint.masks([])[0]) == [0, EOS]
    assert constraint.forced() == []


def test_a_request_goes_on_from_what_it_has_emitted(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    rng = random.Random(9)
    asked = params(json=PERSON, after_token_ids=[60])
    tokens = [50, 60, *generate(grammars.constraint(params(json=PERSON)), rng, tokenizer)[0]]
    for cut in range(len(tokens) + 1):
        constraint = grammars.constraint(asked)
        constraint.accept(tokens[:cut])
        again = grammars.constraint(asked, emitted=tokens[:cut])
        assert np.array_equal(again.masks(tokens[cut:]), constraint.masks(tokens[cut:]))


def test_all_rows_of_a_step_are_filled_at_once(grammars: Grammars, tokenizer: Tokenizer) -> None:
    constraints = [grammars.constraint(kind) for kind in KINDS]
    constraints.append(grammars.constraint(params(choice=["ab"], after_token_ids=[60])))
    marked = params(choice=["ab"], after_token_ids=[60], opening_token_ids=[50])
    constraints += [grammars.constraint(marked) for _ in range(2)]
    rng = random.Random(2)
    drafts = [
        generate(grammars.constraint(kind), rng, tokenizer, rng.randrange(4))[0] for kind in KINDS
    ]
    drafts.append([60, *tokenizer.encode("a")])
    drafts += [[50, 60, *tokenizer.encode("a")], tokenizer.encode("a")]
    assert grammars.masks is not None
    mask_RWV = np.full((len(constraints) + 1, 5, 10), 77, np.int32)
    rows = [(i + 1, c, d) for i, (c, d) in enumerate(zip(constraints, drafts, strict=True))]
    assert grammars.masks.fill(rows, mask_RWV) == {}
    for index, constraint, ids in rows:
        assert np.array_equal(mask_RWV[index, : len(ids) + 1], constraint.masks(ids))
    assert (mask_RWV[0] == 77).all(), "a row that was not asked for"


def test_a_grammar_that_fails_in_a_step_fails_alone(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    good, bad = (grammars.constraint(params(regex="[a-z]+")) for _ in range(2))
    with pytest.raises(GrammarFailed):
        bad.accept(tokenizer.encode("7"))
    assert grammars.masks is not None
    mask_RWV = np.full((2, 2, 10), -1, np.int32)
    errors = grammars.masks.fill([(0, bad, []), (1, good, tokenizer.encode("a"))], mask_RWV)
    assert list(errors) == [0]
    assert np.array_equal(mask_RWV[1], good.masks(tokenizer.encode("a")))


# ---- refusals and limits


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"json": {"type": "array", "contains": {"type": "null"}}}, "'contains'"),
        ({"json": {"properties": {"a": {"not": {"type": "null"}}}}}, "'not'"),
        ({"json": {"type": "array", "uniqueItems": True}}, "'uniqueItems'"),
        ({"json": {"type": "string", "format": "zzz"}}, "'format' does not support 'zzz'"),
        ({"json": {"oneOf": [{"type": "string"}, {"minLength": 2}]}}, "'oneOf' is not supported"),
        ({"json": {"type": "nothing"}}, "nothing"),
        ({"json": {"$ref": "http://example.com/x"}}, "'$ref': 'http://example.com/x'"),
        ({"json": "{"}, "not JSON"),
        ({"json": {"not": {}, "x-guidance": {"lenient": True}}}, "'not'"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"grammar": "start: missing"}, "missing"),
        ({"choice": ["a"] * 5000}, "5000 entries"),
        ({"regex": "a" * MAX_SOURCE_BYTES}, "the limit is 131072"),
        ({"json": json.loads('{"items":' * 100 + "{}" + "}" * 100)}, f"than {MAX_DEPTH} levels"),
        ({"structural_tag": {"format": {"type": "token"}}}, "'token' is not supported"),
        ({"structural_tag": {"type": "x"}}, "structural_tag must be"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    grammars: Grammars, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidGrammar, match=re.escape(words)) as caught:
        grammars.constraint(params(**fields))
    assert caught.value.param == "structured_outputs"


@pytest.mark.parametrize(
    "fields",
    [
        {"json": {"type": "integer", "then": {}, "else": {}, "minContains": 2}},
        {"json": {"type": "integer", "if": {"type": "null"}}},
        {"json": {"type": "array", "uniqueItems": False, "maxItems": 2.0, "items": {"const": 1}}},
        {"json": {"type": "object", "unevaluatedProperties": True, "$dynamicAnchor": "node"}},
    ],
)
def test_keywords_without_effect_are_served(grammars: Grammars, fields: dict[str, Any]) -> None:
    grammars.constraint(params(**fields))


def test_unevaluated_properties_are_additional_properties_without_other_schemas(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "unevaluatedProperties": False,
    }
    constraint = grammars.constraint(params(json=schema, disable_any_whitespace=True))
    with pytest.raises(GrammarFailed):
        constraint.accept(tokenizer.encode('{"b'))
    with pytest.raises(InvalidGrammar, match="unevaluatedProperties"):
        grammars.constraint(params(json={**schema, "allOf": [{"minProperties": 1}]}))


def test_additional_properties_can_be_disabled(grammars: Grammars, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {}}}}
    free = grammars.constraint(params(json=schema))
    free.accept(tokenizer.encode('{"a":{"x'))
    closed = grammars.constraint(params(json=schema, disable_additional_properties=True))
    with pytest.raises(GrammarFailed):
        closed.accept(tokenizer.encode('{"a":{"x'))


def test_long_chains_of_rules_do_not_end_the_process(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    count = 9000
    chain = "\n".join(f"r{i}: r{i + 1}" for i in range(count))
    assert len(chain) < MAX_SOURCE_BYTES
    constraint = grammars.constraint(params(grammar=f'start: r0\n{chain}\nr{count}: "a"'))
    assert tokenizer.decode(constraint.forced()) == "a"
    defs: dict[str, Any] = {
        f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}, "minItems": 1}
        for i in range(1400)
    }
    defs["d1400"] = {"const": 1}
    nested = grammars.constraint(params(json={"$defs": defs, "$ref": "#/$defs/d0"}))
    nested.accept(tokenizer.encode("[" * 1400))
    assert nested.masks([]).any()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "has no constraint"),
        ({"regex": "a", "json_object": True}, "regex, json_object"),
        ({"jsn": {}}, "Did you mean 'json'"),
        ({"json": 5}, "json must be an object"),
        ({"choice": []}, "at least one string"),
        ({"choice": [1]}, "at least one string"),
        ({"regex": 3}, "regex must be a string"),
        ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}, "give one"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(words)) as caught:
        StructuredOutputsParams(**fields)
    assert caught.value.param == "structured_outputs"


def test_sampling_params_take_a_dict(tokenizer: Tokenizer) -> None:
    made = SamplingParams(structured_outputs={"choice": ["a"]})  # type: ignore[arg-type]
    assert made.structured_outputs == params(choice=["a"])


# ---- compiling


def test_a_request_waits_without_blocking_and_is_ready_later(tokenizer: Tokenizer) -> None:
    grammars, woken = grammars_of(tokenizer), threading.Event()
    grammars.on_ready = woken.set
    assert grammars.start(request(1, choice=["a", "b"])) is None
    assert grammars.num_waiting == 1
    assert woken.wait(60)
    ((ready, constraint),) = grammars.take_ready()
    assert ready.uid == 1
    assert isinstance(constraint, GrammarConstraint)
    assert grammars.num_waiting == 0
    again = grammars.start(request(2, choice=["a", "b"]))
    assert isinstance(again, GrammarConstraint), "a kept grammar is ready at once"
    again.accept(tokenizer.encode("a"))
    assert allowed(constraint.masks([])[0]) != allowed(again.masks([])[0]), "states are separate"


def test_the_same_grammar_is_compiled_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[StructuredOutputsParams] = []

    def counted(asked: StructuredOutputsParams, specials: Any) -> str:
        texts.append(asked)
        return grammar_text(asked, specials)

    monkeypatch.setattr(grammars_module, "grammar_text", counted)
    monkeypatch.setattr(grammars_module, "MOST_KEPT", 2)
    grammars = grammars_of(tokenizer)
    for uid in range(8):
        grammars.start(request(uid, choice=["a"], after_token_ids=[uid]))
    wait_for(lambda: len(grammars.take_ready()) == 0 and grammars.num_waiting == 0, 60)
    assert len(texts) == 1
    for name in ("b", "c", "a"):  # the oldest of three is dropped
        grammars.constraint(params(choice=[name]))
    assert len(texts) == 4


def test_the_kept_grammars_are_bounded_in_bytes(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars_module, "MOST_KEPT_BYTES", 100)
    grammars = grammars_of(tokenizer)
    for letter in "abcd":
        grammars.constraint(params(choice=[letter * 30]))
        assert 30 < grammars._num_bytes <= 100
    grammars.constraint(params(choice=["e" * 200]))  # served, and not kept
    assert (len(grammars._kept), grammars._num_bytes) == (0, 0)


def slow_compiler(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    go = threading.Event()
    monkeypatch.setattr(grammars_module, "grammar_text", lambda *_: go.wait(60) and 'start: "a"')
    return go


def test_an_error_is_of_its_own_request(tokenizer: Tokenizer) -> None:
    grammars = grammars_of(tokenizer)
    grammars.start(request(1, json={"not": {}}))
    grammars.start(request(2, choice=["a"]))
    found = outcomes(grammars, 2)
    assert isinstance(found[1], InvalidGrammar)
    assert isinstance(found[2], GrammarConstraint)
    with pytest.raises(InvalidGrammar):
        grammars.start(request(3, json={"not": {}}))


def test_an_output_that_does_not_fit_its_grammar_ends_its_own_request(tokenizer: Tokenizer) -> None:
    grammars = grammars_of(tokenizer)
    emitted = tokenizer.encode("no", add_special_tokens=False)
    grammars.start(replace(request(1, choice=["yes"]), output_token_ids=emitted))
    assert isinstance(outcomes(grammars, 1)[1], GrammarFailed)


def test_a_slow_grammar_is_given_up_and_an_aborted_one_forgotten(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = slow_compiler(monkeypatch)
    grammars = grammars_of(tokenizer, timeout_s=0.2)
    grammars.start(request(1, choice=["a"]))
    grammars.start(request(2, choice=["b"]))
    assert grammars.forget(2)
    assert not grammars.forget(2)
    found = outcomes(grammars, 1)
    release.set()
    assert isinstance(found[1], InvalidGrammar)
    assert "not compiled within 0.2 s" in str(found[1])


def test_a_grammar_that_waited_for_others_too_long_may_be_sent_again(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = slow_compiler(monkeypatch)
    grammars = grammars_of(tokenizer, timeout_s=0.2)
    for uid, name in enumerate("abc"):
        grammars.start(request(uid, choice=[name]))
    errors = outcomes(grammars, 3)
    release.set()
    assert [isinstance(errors[uid], InvalidGrammar) for uid in range(3)] == [True, True, False]
    assert "Try again" in str(errors[2])
    assert isinstance(grammars.constraint(params(choice=["c"])), GrammarConstraint)


def test_without_llguidance_the_extra_is_named(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(MissingExtra, match=r"paceline\[structured\]"):
        grammars_of(tokenizer).constraint(params(choice=["a"]))
