"""The bytes between front and engine: what goes in comes out, without pickle."""

from __future__ import annotations

import pickletools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.messages import (
    Abort,
    Control,
    Died,
    Ended,
    Events,
    Gauges,
    Ready,
    StartupProgress,
    StepMessage,
    StepTimes,
    Traced,
    decode,
    decode_submit,
    encode,
    encode_abort,
    encode_step,
    encode_submit,
)
from paceline.request import Done, EngineRequest, SamplingParams
from paceline.scheduler.snapshots import SnapshotStats
from paceline.step import NO_REQUEST, RunnerInfo, StepResult, TokenLogprobs

INFO = RunnerInfo(10, 16, 4, 128, 500, 3, 3, model_name="tiny", startup_s={"weights": 2.5})


def submitted(request: EngineRequest) -> EngineRequest:
    message = decode(encode_submit(request))
    assert isinstance(message, EngineRequest)
    return message


def test_a_request_crosses_with_every_field() -> None:
    params = SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.5,
        logit_bias={7: -3.5, 12: 100.0},
        bad_words=["no"],
        allowed_token_ids=[1, 2, 3],
        min_tokens=2,
        max_tokens=77,
        stop=["\n", "é"],
        stop_token_ids=[5],
        include_stop_str_in_output=True,
        ignore_eos=True,
        seed=-(2**63),
        logprobs=3,
        prompt_logprobs=0,
        skip_special_tokens=False,
        logits_processors=["mine"],
        extra_args={"a": [1, {"b": None}]},
        num_speculative_tokens=2,
    )
    request = EngineRequest(
        uid=2**40,
        prompt_token_ids=[0, 1, 2**31 - 1],
        params=params,
        eos_token_ids=(2, 3),
        bad_word_ids=((4, 5), (6,)),
        priority=-9,
        arrival_s=12.25,
    )
    got = submitted(request)
    assert list(got.prompt_token_ids) == [0, 1, 2**31 - 1]
    assert got.params.logit_bias == {7: -3.5, 12: 100.0}
    assert list(got.params.allowed_token_ids or ()) == [1, 2, 3]
    assert got.params.replace(allowed_token_ids=[1, 2, 3]) == params
    assert (got.uid, got.eos_token_ids, got.bad_word_ids) == (2**40, (2, 3), ((4, 5), (6,)))
    assert (got.priority, got.arrival_s) == (-9, 12.25)


def test_default_parameters_cost_few_bytes() -> None:
    request = EngineRequest(1, [1, 2, 3], SamplingParams(seed=1))
    assert len(encode_submit(request)) < 150
    assert submitted(request).params == request.params


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2**31 - 1), max_size=50), st.integers(0, 2**62))
def test_any_prompt_crosses(prompt: list[int], uid: int) -> None:
    got = decode_submit(encode_submit(EngineRequest(uid, prompt, SamplingParams())))
    assert list(got.prompt_token_ids) == prompt
    assert got.uid == uid


@pytest.mark.parametrize(
    "message",
    [
        Control.DRAIN,
        Control.STOP,
        Control.RESET_PREFIX_CACHE,
        Control.START_TRACE,
        Control.READ_TRACE,
        Control.TAKE_TRACE,
        Traced(b"\x00\x7b\xff"),
        Control.STOPPED,
        Died("no memory: 3 GiB"),
        StartupProgress("weights", 0.5),
        Ready(INFO),
    ],
    ids=lambda m: type(m).__name__,
)
def test_rare_messages_cross(
    message: Control | Died | StartupProgress | Ready | Traced,
) -> None:
    assert decode(encode(message)) == message


def test_aborts_cross_several_at_once() -> None:
    assert decode(encode_abort([1, 2**50])) == Abort((1, 2**50))


def logprobs(row: int, positions: int, width: int) -> TokenLogprobs:
    ids = np.arange(positions * width, dtype=np.int32).reshape(positions, width)
    return TokenLogprobs(row, ids, -ids.astype(np.float32), ids[:, 0] + 1)


def step_message(rows: int, width: int, num_logprobs: int) -> StepMessage:
    rng = np.random.default_rng(rows)

    def column() -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return rng.integers(0, 9, rows, np.int32)

    result = StepResult(
        step=2**40,
        uid_B=rng.integers(0, 2**60, rows),
        count_B=column(),
        token_BW=rng.integers(-1, 2**31 - 1, (rows, width), np.int32),
        done_B=column(),
        num_drafts_B=column(),
        num_accepted_B=column(),
        logprobs=[logprobs(i, 2, 3) for i in range(num_logprobs)],
        prompt_logprobs=[logprobs(i, 5, 1) for i in range(num_logprobs)],
    )
    events = Events([(1, 16), (2**50, 0)], [7], [Ended(3, Done.ABORT), Ended(4, 6, "é", "X")])
    times = [StepTimes(1e-6, 2e-3, 0.1)] * rows
    gauges = Gauges(3, 0.25, 5, 6, times, SnapshotStats(0.5, 2**33, 7, 8))
    return StepMessage(result, events, gauges)


def packed(message: StepMessage) -> bytes:
    return encode_step(message.result, message.events, message.gauges)


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("num_logprobs", [0, 2])
def test_a_step_crosses_row_by_row(rows: int, width: int, num_logprobs: int) -> None:
    message = step_message(rows, width, num_logprobs)
    got = decode(packed(message))
    assert isinstance(got, StepMessage)
    assert got.result.step == message.result.step
    for name in ("uid_B", "count_B", "token_BW", "done_B", "num_drafts_B", "num_accepted_B"):
        np.testing.assert_array_equal(getattr(got.result, name), getattr(message.result, name))
    assert got.events == message.events
    assert got.gauges == message.gauges
    for kind in ("logprobs", "prompt_logprobs"):
        entries, wanted = getattr(got.result, kind), getattr(message.result, kind)
        assert len(entries) == num_logprobs
        for entry, want in zip(entries, wanted, strict=True):
            assert entry.row == want.row
            np.testing.assert_array_equal(entry.ids, want.ids)
            np.testing.assert_array_equal(entry.values, want.values)
            np.testing.assert_array_equal(entry.rank, want.rank)


def test_events_cross_without_rows() -> None:
    events = Events(ended=[Ended(9, Done.ERROR, "too long", "PromptTooLong")])
    got = decode(encode_step(StepResult.without_rows(3), events, Gauges()))
    assert isinstance(got, StepMessage)
    assert len(got.result.uid_B) == 0
    assert got.events == events


@pytest.mark.parametrize(
    "data",
    [
        encode(Ready(INFO)),
        packed(step_message(3, 2, 1)),
        encode_submit(EngineRequest(1, [1], SamplingParams())),
    ],
)
def test_no_message_is_a_pickle(data: bytes) -> None:
    with pytest.raises(Exception, match=r"opcode|pickle|argument|unknown"):
        list(pickletools.genops(data))


def test_an_unknown_message_is_an_error() -> None:
    with pytest.raises(AssertionError, match="unknown kind 99"):
        decode(bytes((99,)) + b"{}")


def test_dropped_rows_keep_their_places_and_say_nothing() -> None:
    result = step_message(3, 2, 3).result
    planned_B = result.uid_B
    first, _, last = planned_B.tolist()
    result.drop([1])
    assert result.uid_B.tolist() == [first, NO_REQUEST, last]
    assert planned_B.tolist().count(NO_REQUEST) == 0, "the plan has its own uids"
    for name in ("count_B", "done_B", "num_drafts_B", "num_accepted_B"):
        assert getattr(result, name)[1] == 0
    assert [entry.row for entry in result.logprobs] == [0, 2]
