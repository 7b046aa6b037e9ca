"""The GPU benchmark against a made-up engine: what it asks for, what it times, what it forgives."""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bench import bench_engines
from bench.bench_engines import CASES, keywords, main
from bench.graph_check import MARGIN, NUM_TRIES, Answers, GraphCheck, differences
from bench.mixed_tpot import token_gaps
from bench.model_configs import CONFIGS, weight_bytes_per_step, write_configs
from paceline.config import EngineConfig
from paceline.engine.messages import StepTimes

ARGUMENTS = Namespace(
    engine="paceline",
    load=False,
    prompt=128,
    bs=[1, 8],
    sync=False,
    eager=False,
    kv_cache_dtype=None,
    set=[],
    contexts=[],
    prompts=[],
)


@dataclass
class FakeLLM:
    """A second per token and request; remembers who it was. Tokens count up from the prompt's."""

    opened: list[FakeLLM]
    options: dict[str, Any]
    clock: list[float]
    asked: list[tuple[int, int, Any]] = field(default_factory=list)
    is_closed: bool = False
    stats: Any = None

    def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> list[Any]:
        assert use_tqdm is False
        assert [llm for llm in self.opened if not llm.is_closed] == [self], "one engine at a time"
        self.asked.append((len(prompts), params.max_tokens, params))
        self.clock[0] += len(prompts[0]["prompt_token_ids"]) + params.max_tokens * len(prompts)
        self.stats.recent.append(StepTimes(0.00001, 0.001, 0.0002))
        return [self._output(p["prompt_token_ids"][0], params) for p in prompts]

    def _output(self, first: int, params: Any) -> Any:
        tokens = [first + i for i in range(params.max_tokens)]
        if self.options.get("wrong") and not self.options.get("enforce_eager"):
            tokens[7] += 1
        best = [
            {t: SimpleNamespace(logprob=-1.0), t + 1: SimpleNamespace(logprob=-1.0 - params.gap)}
            for t in tokens
        ]
        logprobs = best if getattr(params, "logprobs", None) else None
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=logprobs)])

    def get_metrics(self) -> Any:
        return self.stats

    def close(self) -> None:
        self.is_closed = True


@dataclass
class Engine:
    opened: list[FakeLLM] = field(default_factory=list)
    clock: list[float] = field(default_factory=lambda: [0.0])
    gap: float = 1.0  # between the two best tokens


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    state = Engine()

    def llm(**options: Any) -> FakeLLM:
        state.opened.append(FakeLLM(state.opened, options, state.clock))
        state.opened[-1].stats = SimpleNamespace(
            recent=deque(), num_drafts=0, num_accepted_tokens=0
        )
        return state.opened[-1]

    module = ModuleType("fake_engine")
    module.LLM = llm  # type: ignore[attr-defined]
    module.SamplingParams = lambda **values: SimpleNamespace(  # type: ignore[attr-defined]
        **values, gap=state.gap
    )
    monkeypatch.setitem(sys.modules, "fake_engine", module)
    monkeypatch.setattr("bench.bench_engines.time.perf_counter", lambda: state.clock[0])
    return state


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["bench_engines.py", "fake_engine", *arguments])
    return main()


def results(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.splitlines() if line.startswith("RESULT ")]
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


def test_time_per_token_is_the_slope_and_each_case_has_its_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "sm,l8", "--bs", "1,8,256") == 0
    assert results(capsys.readouterr().out) == [
        {"engine": "fake_engine", "case": case, "init_s": 0.0, "tpot_ms": tpot_ms}
        for case in ("sm", "l8")
        for tpot_ms in [{"1": 1e3, "8": 8e3, "256": 256e3}]
    ]
    assert [llm.is_closed for llm in engine.opened] == [True, True]
    assert engine.opened[0].options["max_num_seqs"] == 256
    assert engine.opened[0].asked[0][:2] == (1, 16)


def test_an_engine_that_is_late_for_a_while_has_no_other_time_per_token(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.bench_engines.ENOUGH_S", math.inf)
    late_s = iter([900.0] * 18)  # for half of its calls
    answer = FakeLLM.generate

    def generate(llm: FakeLLM, *args: Any, **values: Any) -> list[Any]:
        engine.clock[0] += next(late_s, 0.0)
        return answer(llm, *args, **values)

    monkeypatch.setattr(FakeLLM, "generate", generate)
    assert run(monkeypatch, "sm", "--bs", "1") == 0
    assert results(capsys.readouterr().out)[0]["tpot_ms"] == {"1": 1e3}


def test_load_gives_tokens_per_second(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    assert run(monkeypatch, "sm", "--load", "--json", str(tmp_path / "load.json")) == 0
    (line,) = results(capsys.readouterr().out)
    assert line["in 1x4096 tok/s"] == round(4096 / 4097)
    assert line["out 256x512+128 tok/s"] == round(256 * 128 / (512 + 256 * 128))
    assert len([name for name in line if name.endswith("tok/s")]) == 6
    assert engine.opened[0].options["max_model_len"] == 8192
    (found,) = json.loads((tmp_path / "load.json").read_text())["runs"]
    assert {f"{what} tok/s" for what in found["steps"]} <= found.keys()
    assert found["steps"]["out 64x4000+64"]["num_steps"] == 2  # one a run, and the first is warm


def test_prompts_are_measured_in_the_same_engine_with_and_without_quantization(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "l8,l8-fp8", "--bs", "1", "--prompts", "8x2048") == 0
    plain, rounded = results(capsys.readouterr().out)
    assert plain["in 8x2048 tok/s"] == rounded["in 8x2048 tok/s"] == round(8 * 2048 / (2048 + 8))
    assert [llm.options.get("quantization") for llm in engine.opened] == [None, "fp8"]
    assert engine.opened[0].options["max_model_len"] >= 2048 + 1


def test_the_same_engine_also_samples(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "sm", "--bs", "1,8", "--sampled", "8") == 0
    (line,) = results(capsys.readouterr().out)
    assert line["sampled_tpot_ms"] == {"8": 8e3}
    (llm,) = engine.opened
    greedy = [p for _, _, p in llm.asked if p.temperature == 0]
    sampled = [p for _, _, p in llm.asked if p.temperature > 0]
    assert len(greedy) == 1 + 2 * len(sampled)
    assert {(p.temperature, p.top_p) for p in sampled} == {(0.8, 0.95)}


class VllmStub(FakeLLM):
    """vLLM's offline engine keeps no statistics by default; asked for its metrics, it raises."""

    def get_metrics(self) -> Any:
        assert not self.options.get("disable_log_stats", True), "Stat logging disabled"
        return []  # counters, but no times of steps


def test_vllm_is_told_to_keep_the_statistics_that_are_read(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def llm(**options: Any) -> FakeLLM:
        stats = SimpleNamespace(recent=deque())
        engine.opened.append(VllmStub(engine.opened, options, engine.clock, stats=stats))
        return engine.opened[-1]

    vllm = ModuleType("vllm")
    vllm.__dict__.update(LLM=llm, SamplingParams=sys.modules["fake_engine"].SamplingParams)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr(sys, "argv", ["bench_engines.py", "vllm", "sm", "--bs", "1"])
    assert main() == 0
    (line,) = results(capsys.readouterr().out)
    assert (line["engine"], line["tpot_ms"]) == ("vllm", {"1": 1e3})


def test_the_engine_can_be_chosen(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--sync", "--eager", "--prompt", "4000", "--set", "block_size=32"]
    flags += ["--kv-cache-dtype", "fp8"]
    assert run(monkeypatch, "sm", "--bs", "1", *flags) == 0
    (llm,) = engine.opened
    assert llm.options["async_scheduling"] is False
    assert llm.options["enforce_eager"] is True
    assert llm.options["block_size"] == 32
    assert llm.options["kv_cache_dtype"] == "fp8"
    assert llm.options["max_model_len"] >= 4000 + 288
    assert {p.temperature for _, _, p in llm.asked} == {0.0}


def test_the_record_says_everything_and_no_folder_of_this_machine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_engines, "gpu", lambda: {"name": "NVIDIA H200"})
    path = tmp_path / "results" / "sm.json"
    models = tmp_path / "models"
    flags = ["--bs", "1", "--models", str(models), "--json", str(path)]
    assert run(monkeypatch, "sm,sm-eagle", *flags) == 0
    text = path.read_text(encoding="utf-8")
    assert str(tmp_path) not in text
    record = json.loads(text)
    assert record["gpu"] == {"name": "NVIDIA H200"}
    assert record["machine"]["versions"]["numpy"]
    plain, drafted = record["runs"]
    assert plain["keywords"]["model"] == "sm"
    assert plain["bandwidth_share"]["1"] == round(0.056 / 1e3, 4)
    assert drafted["keywords"]["speculative_config"]["model"] == "sm-eagle"
    assert plain["steps"]["1"]["idle_us"]["p50"] == 10.0
    assert (models / "l8" / "config.json").is_file()


@pytest.mark.parametrize(("gap", "code"), [(1.0, 1), (MARGIN / 2, 0)])
def test_other_tokens_with_graphs_are_forgiven_only_at_a_near_tie(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gap: float,
    code: int,
) -> None:
    engine.gap = gap
    assert run(monkeypatch, "sm", "--bs", "1", "--check", "--set", "wrong=true") == code
    out = capsys.readouterr().out
    verdict = json.loads(out.split("CHECK ")[1].splitlines()[0])
    assert verdict["ok"] is (code == 0)
    assert not verdict["output"]["equal"]
    assert {position for _, position, _ in verdict["output"]["differences"]} == {7}
    assert len(results(out)) == 1 - code
    assert [llm.options.get("enforce_eager") for llm in engine.opened] == [True, None]


def test_equal_tokens_pass(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "sm", "--bs", "1", "--check") == 0
    assert '"equal": true' in capsys.readouterr().out


def test_a_token_outside_the_two_best_is_no_near_tie() -> None:
    eager = Answers([[1, 2, 3]], [[{1: -0.1}, {2: -0.1, 9: -0.11}, {3: -0.1}]])
    assert differences(eager, Answers([[1, 2, 3]])) == []
    (near,) = differences(eager, Answers([[1, 9, 4]]))
    assert (near.position, round(near.gap, 6)) == (1, 0.01)
    (far,) = differences(eager, Answers([[1, 5, 4]]))
    assert far.gap == float("inf")
    assert [near.record(), far.record()] == [[0, 1, 0.01], [0, 1, None]]


@pytest.mark.parametrize(
    ("graph", "gaps"),
    [
        ([1, 2, 3], []),  # as without logprobs
        ([1, 9, 4], []),  # as with them
        ([1, 9, 5], [0.01]),
        ([1, 9, 6], [None]),
        ([1, 2, 7], [None]),  # where only the run without logprobs went
    ],
)
def test_an_eager_engine_that_answers_twice_is_right_both_times(
    monkeypatch: pytest.MonkeyPatch, graph: list[int], gaps: list[float | None]
) -> None:
    """Another arrival is another batch, and another last bit."""
    ranked = Answers([[1, 9, 4]], [[{1: -0.1}, {9: -0.1}, {4: -0.1, 5: -0.11}]])
    said = iter((Answers([[1, 2, 3]]), *[ranked] * NUM_TRIES, Answers([graph])))
    monkeypatch.setattr("bench.graph_check.answers", lambda *_, **__: next(said))
    check = GraphCheck(SimpleNamespace, [[0]], has_drafts=False)
    check.learn(None)
    verdict = check.compare(None)
    assert [gap for _, _, gap in verdict["output"]["differences"]] == gaps
    assert verdict["ok"] is (None not in gaps)


def test_an_unknown_case_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "xl")
    assert "no case xl" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["sm", "l8"])
def test_our_engine_knows_every_keyword(name: str, tmp_path: Path) -> None:
    contexts = {"contexts": [(1, 64_000)]}
    fp8 = {"kv_cache_dtype": "fp8"}
    for change in ({}, {"load": True}, {"sync": True, "eager": True}, contexts, fp8):
        args = Namespace(**{**vars(ARGUMENTS), **change})
        config = EngineConfig.from_keywords(**keywords(args, CASES[name], tmp_path))
        assert config.model.load_format == "dummy"


def test_the_weights_that_a_step_reads_are_those_of_the_shapes(tmp_path: Path) -> None:
    """Milliseconds at 4.8 TB/s; the table of the 8B head is per token, at 2.5 a step."""
    for model, head, k, wanted in (
        ("sm", None, 0, 0.056),
        ("sm", "sm-eagle", 3, 0.097),
        ("l8", None, 0, 3.13),
        ("l8", "l8-eagle", 3, 1.64 * 2.5),
    ):
        num_bytes = weight_bytes_per_step(model, head, k)
        assert num_bytes is not None
        assert num_bytes / 4.8e12 * 1e3 == pytest.approx(wanted, rel=0.01)
    assert weight_bytes_per_step("glm", None, 0) is None
    wide, narrow = (weight_bytes_per_step("l8", None, 0, x) for x in (None, "fp8"))
    lm_head = 2 * 4096 * 128_256
    assert wide is not None
    assert narrow == (wide - lm_head) // 2 + lm_head
    write_configs(tmp_path)
    for name, config in CONFIGS.items():
        assert json.loads((tmp_path / name / "config.json").read_text(encoding="utf-8")) == config


def test_tokens_that_come_together_share_their_gap() -> None:
    answer: Any = SimpleNamespace(arrivals=[(1.0, 1), (2.0, 1), (3.0, 4), (9.0, 1)])
    assert token_gaps(answer, 1.5, 5.0) == [0.25] * 4
    assert token_gaps(answer, 0.0, 10.0) == [1.0, *[0.25] * 4, 6.0]
