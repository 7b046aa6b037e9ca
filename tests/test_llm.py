"""The offline API over an engine without a model: what goes in, what comes out, in which order."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import paceline
from paceline import LLM, InvalidRequest, PromptTooLong, SamplingParams
from paceline.engine.client import EngineClient
from paceline.engine.front import Front
from paceline.errors import ConfigError, EngineDead
from paceline.observe.progress import ProgressLine
from tests.engine.echo_client import EOS, echo_client, echo_front
from tests.patience import PATIENCE_S

SIX = SamplingParams(max_tokens=6)


@contextmanager
def echo_llm(behaviour: str = "", **options: Any) -> Iterator[LLM]:
    with echo_client(behaviour, **options) as client, LLM.from_client(client) as llm:
        yield llm


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with echo_llm() as llm:
        yield llm


def texts(outputs: list[Any]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


# ---- prompts


def test_every_shape_of_a_prompt_is_taken(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("abc")
    prompts: list[Any] = ["abc", {"prompt": "abc"}, {"prompt_token_ids": ids}, ids]
    for prompt in prompts:
        assert texts(llm.generate(prompt, SIX, use_tqdm=False)) == ["abcabc"]
    both = llm.generate([*prompts, {"prompt": "shown", "prompt_token_ids": np.array(ids)}], SIX)
    assert texts(both) == ["abcabc"] * 5
    assert [o.prompt for o in both] == ["abc", "abc", None, None, "shown"]
    assert all(o.prompt_token_ids == ids for o in both)
    assert llm.generate([], SIX) == []


def test_outputs_carry_what_was_asked_for(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, n=2, logprobs=1, prompt_logprobs=0)
    (output,) = llm.generate("ab", params, use_tqdm=False)
    assert output.finished
    assert output.prompt == "ab"
    assert [o.index for o in output.outputs] == [0, 1]
    for completion in output.outputs:
        assert completion.text == "aba"
        assert completion.finish_reason == "length"
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(completion.token_ids) == 3
        assert completion.cumulative_logprob == pytest.approx(-4.5)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == 2
    metrics = output.metrics
    assert metrics.finished_time is not None
    assert metrics.first_token_time is not None
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time
    assert output.num_cached_tokens == metrics.num_cached_tokens


def test_ends_are_told_apart(llm: LLM) -> None:
    params = SamplingParams(max_tokens=9, stop=["c"])
    stopped, ended = llm.generate(["abcd", "ab<end>"], params, use_tqdm=False)
    assert (stopped.outputs[0].text, stopped.outputs[0].stop_reason) == ("ab", "c")
    assert len(stopped.outputs[0].token_ids) == 3
    assert (ended.outputs[0].text, ended.outputs[0].stop_reason) == ("ab", None)
    assert ended.outputs[0].token_ids[-1] == EOS
    assert {stopped.outputs[0].finish_reason, ended.outputs[0].finish_reason} == {"stop"}


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    """Later prompts are shorter, so they finish first."""
    prompts = [f"prompt {i}," for i in range(60)]
    params = [SamplingParams(max_tokens=61 - i) for i in range(60)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [o.prompt for o in outputs] == prompts
    assert [len(o.outputs[0].token_ids) for o in outputs] == [61 - i for i in range(60)]
    assert len({o.request_id for o in outputs}) == 60


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (5, "prompts must be"),
        (["a", 5], "A prompt must be"),
        ({"promt": "a"}, "Did you mean 'prompt'"),
        ({}, 'needs "prompt"'),
        ({"prompt": 5}, "must be a string"),
        ({"prompt_token_ids": 5}, "must be a list"),
        ([[]], "empty"),
        ("", "empty"),
        ({"prompt_token_ids": [1, 10_000]}, "out of range"),
    ],
)
def test_a_prompt_of_another_shape_is_refused(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(prompts, SIX, use_tqdm=False)


def test_one_bad_prompt_raises_before_any_is_submitted(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: EngineClient, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("submitted")

    monkeypatch.setattr(EngineClient, "submit", refuse)
    with pytest.raises(PromptTooLong, match="600 tokens"):
        llm.generate(["fine", "x" * 600, "fine"], SIX, use_tqdm=False)


def test_parameters_are_one_for_all_or_one_per_prompt(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="2 entries for 3 prompts"):
        llm.generate(["a", "b", "c"], [SIX, SIX])
    wrong: Any = {"max_tokens": 4}
    with pytest.raises(InvalidRequest, match="must be SamplingParams"):
        llm.generate("a", wrong)
    with pytest.raises(InvalidRequest, match="priority"):
        llm.generate(["a", "b"], SIX, priority=[1])


def test_the_old_keyword_and_unknown_ones_are_refused_with_what_to_do(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="pass the ids as prompts"):
        llm.generate("a", prompt_token_ids=[[1]])
    with pytest.raises(InvalidRequest, match="Did you mean 'sampling_params'"):
        llm.generate("a", sampling_param=SIX)


def test_an_unknown_sampling_parameter_is_refused_with_the_nearest() -> None:
    with pytest.raises(InvalidRequest, match="Did you mean 'temperature'") as error:
        SamplingParams(temprature=0)  # type: ignore[call-arg]
    assert error.value.param == "temprature"
    with pytest.raises(InvalidRequest, match=r"'length_penalty'\.$"):
        SamplingParams(length_penalty=1.0)  # type: ignore[call-arg]
    with pytest.raises(InvalidRequest, match="Did you mean 'top_k'"):
        SamplingParams().replace(topk=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_length": 5}, "Did you mean 'max_model_len'"),
        ({"trust_remote_code": True}, "never runs code"),
        ({"speculative_config": {"method": "ngram", "k": 1}}, "speculative_config key"),
    ],
)
def test_an_unknown_option_raises_before_an_engine_is_started(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("nowhere", **options)


# ---- defaults


def test_without_sampling_params_the_defaults_of_the_model_hold() -> None:
    front = echo_front(default_sampling={"max_tokens": 3, "temperature": 0.5})
    with echo_llm(front=front) as llm:
        params = llm.get_default_sampling_params()
        assert (params.max_tokens, params.temperature) == (3, 0.5)
        assert texts(llm.generate("ab", use_tqdm=False)) == ["aba"]
        # given ones are taken as they are
        assert texts(llm.generate("ab", SamplingParams(max_tokens=1))) == ["a"]


def test_without_a_tokenizer_ids_go_in_and_ids_come_out() -> None:
    front = Front(tokenizer=None, eos_token_ids=(EOS,))
    with echo_llm(front=front, skip_tokenizer_init=True) as llm:
        (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, SIX, use_tqdm=False)
        assert output.outputs[0].token_ids == [5, 6, 7, 5, 6, 7]
        assert output.outputs[0].text == ""
        with pytest.raises(InvalidRequest, match="skip_tokenizer_init"):
            llm.generate("text", SIX)
        with pytest.raises(InvalidRequest, match="skip_tokenizer_init"):
            llm.get_tokenizer()


# ---- many prompts, interrupts and ends


def test_ten_thousand_prompts_finish_with_a_bounded_window(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    pump = EngineClient.pump

    def watched(self: EngineClient, timeout_s: float | None = 0.0) -> int:
        nonlocal most
        most = max(most, self.num_open)
        return pump(self, timeout_s)

    monkeypatch.setattr(EngineClient, "pump", watched)
    with echo_llm("slots=64", in_process=False) as llm:
        prompts = [f"{i:05d}" for i in range(10_000)]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=5), use_tqdm=False)
    assert texts(outputs) == prompts
    assert most == 256


def test_prompts_reach_the_engine_together() -> None:
    """Eight prompts take as many steps as one: none of them runs alone before the others came."""
    with echo_llm("slots=8", in_process=False) as llm:

        def num_steps(prompts: list[str]) -> int:
            before = llm.get_metrics().num_steps
            llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
            return llm.get_metrics().num_steps - before

        assert {num_steps([f"prompt {i}" for i in range(8)]) for _ in range(20)} == {1}


def test_a_request_wider_than_the_window_runs_too() -> None:
    with echo_llm("slots=1") as llm:
        outputs = llm.generate(["ab", "cd"], SamplingParams(n=9, max_tokens=2), use_tqdm=False)
        assert [o.text for output in outputs for o in output.outputs] == ["ab"] * 9 + ["cd"] * 9


def test_lower_priorities_are_submitted_first() -> None:
    with echo_llm("slots=1", scheduling_policy="priority") as llm:
        prompts = [f"{i:02d}" for i in range(12)]
        ranks = list(range(12, 0, -1))
        params = SamplingParams(max_tokens=2)
        outputs = llm.generate(prompts, params, use_tqdm=False, priority=ranks)
        assert texts(outputs) == prompts
        ends = [o.metrics.finished_time or 0.0 for o in outputs]
        assert ends == sorted(ends, reverse=True)


def test_ctrl_c_aborts_what_runs_and_leaves_the_llm_usable() -> None:
    with echo_llm("delay_s=0.1") as llm:  # all of it would take ten minutes and more
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["abc"] * 200, SamplingParams(max_tokens=400), use_tqdm=False)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert texts(llm.generate("abc", SIX, use_tqdm=False)) == ["abcabc"]
        assert time.monotonic() - started < PATIENCE_S, "it waited behind what was aborted"


def test_a_dead_engine_raises_and_does_not_hang() -> None:
    with echo_llm("fail_at=5") as llm:
        with pytest.raises(EngineDead, match="caught fire"):
            llm.generate(["abc"] * 30, SamplingParams(max_tokens=100), use_tqdm=False)
        with pytest.raises(EngineDead):
            llm.generate("abc", SIX, use_tqdm=False)


def test_two_threads_may_share_an_llm(llm: LLM) -> None:
    results: dict[str, list[str]] = {}

    def ask(word: str) -> None:
        results[word] = texts(llm.generate([word] * 30, SIX, use_tqdm=False))

    threads = [threading.Thread(target=ask, args=(word,)) for word in ("abc", "xyz")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"abc": ["abcabc"] * 30, "xyz": ["xyzxyz"] * 30}


# ---- progress and names


def test_use_tqdm_takes_a_maker_of_progress_bars(llm: LLM) -> None:
    class Bar:
        def __init__(self, total: int, desc: str) -> None:
            self.total, self.count, self.closed = total, 0, False
            bars.append(self)

        def update(self, n: int) -> None:
            self.count += n

        def close(self) -> None:
            self.closed = True

    bars: list[Bar] = []
    llm.generate(["a", "b", "c"], SIX, use_tqdm=Bar)
    assert [(b.total, b.count, b.closed) for b in bars] == [(3, 3, True)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_progress_line_is_for_terminals_only() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        line = ProgressLine(4, "Processed prompts", stream)
        line.update(1, 10)
        line.update(3, 30)
        line.close()
        line.close()
    assert pipe.getvalue() == ""
    shown = terminal.getvalue()
    assert shown.endswith("\n")
    assert "4/4" in shown
    assert "100%" in shown
    assert "tok/s" in shown
    assert shown.count("\n") == 1


def test_the_public_names_are_there() -> None:
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
        assert name in dir(paceline)
    with pytest.raises(AttributeError, match="Nothing"):
        _ = paceline.Nothing
