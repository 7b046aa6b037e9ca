"""`paceline verify`: it holds on a correct engine, and each planted bug is found by its check."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from paceline.cli import main
from paceline.commands import loading
from paceline.commands.verify_checks import (
    TIE_TOLERANCE,
    Divergence,
    Proof,
    Status,
    compare_greedy,
    differences,
    seeds,
)
from paceline.commands.verify_statistics import chi_square, chi_square_tail, excess
from paceline.commands.verify_target import About, Ask, Load, Reply
from paceline.engine.client import EngineClient
from paceline.kernels.verify.reference import SampledDrafts
from paceline.runner import runner as runner_module
from paceline.runner import startup
from paceline.runner import step as step_module
from paceline.runner.platform_cuda import CudaPlatform
from paceline.runner.runner import StepRunner
from paceline.sampling import verify as sampling_verify
from paceline.sampling.params import slot_rows
from paceline.scheduler.prefix_cache import PrefixCache
from paceline.state.step_buffers import RING_ENTRIES
from tests.e2e.serving import save_served, served
from tests.tiers import first_or_more
from tests.tiny import save_noisy_draft

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}
SIZES = ["--dtype", "float32", "--cpu-threads", "1", "--block-size", "8", "--max-num-seqs", "8"]
LOAD = ["--max-tokens", "24", "--concurrency", "4"]


class Models:
    """A tiny target with a tokenizer, and a draft that agrees part of the time."""

    def __init__(self, folder: Path) -> None:
        self.target, self.draft = folder / "target", folder / "draft"
        model = save_served(self.target)
        save_noisy_draft(self.draft, model, noise=0.06)
        words = ("red", "green", "blue", "black", "white")
        texts = (" ".join([word, other] * 4) for word in words[:2] for other in words[2:4])
        self.prompts = folder / "prompts.txt"
        self.prompts.write_text("\n".join(texts), encoding="utf-8")

    def sampled(self) -> dict[str, Any]:
        return {
            "method": "draft_model",
            "model": str(self.draft),
            "num_speculative_tokens": 2,
            "draft_sample_method": "probabilistic",
            "adaptive": False,
        }


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("verify"))


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are threads of this process, so that a test can plant a bug in them."""
    monkeypatch.setattr(loading, "start_engine", partial(EngineClient.start, in_process=True))


def verify(
    models: Models, folder: Path, spec: dict[str, Any], *more: str
) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Exit code, status by check, and the report."""
    flags = ["--prompts", str(models.prompts), *LOAD]
    flags += ["--speculative-config", json.dumps(spec) if spec else "none"]
    flags += ["--output", str(folder / "report"), *SIZES, *more]
    code = main(["verify", str(models.target), *flags])
    report = json.loads((folder / "report" / "verify.json").read_text(encoding="utf-8"))
    return code, {check["name"]: check["status"] for check in report["checks"]}, report


# ---- a correct engine


def test_a_correct_engine_holds(
    models: Models, in_process: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found, report = verify(models, tmp_path, NGRAM, "--draws", "200")
    assert found == {
        "greedy": "holds",
        "bubble": "does not apply",
        "seeds": "holds",
        "chi-square": "holds",
        "echo": "holds",
        "prefix cache": "holds",
        "run-ahead": "holds",
        "host sync": "does not apply",
        "collectives": "does not apply",
    }
    assert code == 0
    figures = {check["name"]: check["figures"] for check in report["checks"]}
    assert figures["greedy"]["accepted_drafts"] > 0
    assert figures["chi-square"]["degrees_of_freedom"] > 0
    assert figures["prefix cache"]["cached_tokens"][0] > 0
    assert figures["prefix cache"]["cached_tokens"][1] == 0
    out = capsys.readouterr().out
    assert "greedy        holds" in out
    page = (tmp_path / "report" / "verify.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert "It holds" in page
    for outward in ("http:", "https:", "<script", "<link", "@import", "url("):
        assert outward not in page, f"the report must ask for nothing: {outward}"


@pytest.mark.more
def test_a_correct_engine_with_sampled_drafts_holds(
    models: Models, in_process: None, tmp_path: Path
) -> None:
    code, found, _ = verify(models, tmp_path, models.sampled())
    assert code == 0, found
    assert found["chi-square"] == found["seeds"] == "holds"


# ---- planted bugs


def accept_every_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, **keywords: Any) -> Any:
        verdicts = sampling_verify.verify(*args, **keywords)
        return verdicts._replace(ok_N=torch.ones_like(verdicts.bad_N))

    monkeypatch.setattr(step_module, "verify", wrong)


def judge_by_stale_draft_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draft is judged by the probabilities that the draft before it was drawn from."""

    def stale(onehot_S: torch.Tensor, prob_SKV: torch.Tensor) -> SampledDrafts:
        return SampledDrafts(onehot_S, prob_SKV.roll(1, dims=1))

    monkeypatch.setattr(sampling_verify, "SampledDrafts", stale)


def skip_a_page_of_a_prefix_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit of several pages has the first one twice and the second one never."""
    right = PrefixCache.find

    def wrong(self: PrefixCache, tokens: Any, num_pages: int) -> tuple[list[int], int]:
        pages, chain = right(self, tokens, num_pages)
        return [*pages[:1], *pages[:1], *pages[2:]] if len(pages) > 1 else pages, chain

    monkeypatch.setattr(PrefixCache, "find", wrong)


def swap_rows_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, **keywords: Any) -> Any:
        verdicts = sampling_verify.verify(*args, **keywords)
        return verdicts._replace(token_N=verdicts.token_N.flip(0))

    monkeypatch.setattr(step_module, "verify", wrong)


def draw_by_arrival_instead_of_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    arrivals = iter(range(1 << 30))

    def wrong(*args: Any, **keywords: Any) -> Any:
        return {**slot_rows(*args, **keywords), "seed_S2": np.array([next(arrivals), 0], np.int32)}

    monkeypatch.setattr(runner_module, "slot_rows", wrong)


def misread_results_while_a_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only with run-ahead is another step launched before a result is read."""
    right = StepRunner.wait

    def wrong(self: StepRunner, step: Any) -> Any:
        result = right(self, step)
        if self._turn % RING_ENTRIES != (step.entry + 1) % RING_ENTRIES:
            result.token_BW[result.token_BW > 3] -= 1
        return result

    monkeypatch.setattr(StepRunner, "wait", wrong)


PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "greedy": (accept_every_draft, "ngram"),
    "chi-square": (judge_by_stale_draft_probabilities, "sampled"),
    "prefix cache": (skip_a_page_of_a_prefix_hit, "ngram"),
    "echo": (swap_rows_of_a_batch, "ngram"),
    "seeds": (draw_by_arrival_instead_of_seed, "ngram"),
    "run-ahead": (misread_results_while_a_step_runs, "ngram"),
}


@pytest.mark.parametrize(
    "check", first_or_more(PLANTED, lambda check: check not in ("echo", "seeds", "run-ahead"))
)
def test_a_planted_bug_is_found(
    models: Models,
    in_process: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    check: str,
) -> None:
    plant, drafter = PLANTED[check]
    plant(monkeypatch)
    spec = models.sampled() if drafter == "sampled" else NGRAM
    draws = "1500" if check == "chi-square" else "100"
    code, found, _ = verify(models, tmp_path, spec, "--draws", draws)
    assert found[check] == "does not hold", found
    assert code == 1
    if check == "chi-square":  # nothing else could find it
        assert found["greedy"] == found["seeds"] == found["echo"] == "holds"


@pytest.mark.parametrize("waits", [True, pytest.param(False, marks=pytest.mark.more)])
def test_a_step_that_waits_for_the_gpu_is_found(
    models: Models, in_process: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, waits: bool
) -> None:
    """A CPU stands in for the GPU: torch's mode is recorded, and the planted wait obeys it."""
    modes = ["default"]
    num_checked = 0
    right = StepRunner._stage

    def stage(self: StepRunner, *args: Any) -> None:
        nonlocal num_checked
        num_checked += modes[-1] == "error"
        if waits and modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        right(self, *args)

    monkeypatch.setattr(startup, "CpuPlatform", lambda *_: CudaPlatform(torch.device("cpu")))
    monkeypatch.setattr(CudaPlatform, "name", "a stand-in")
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(StepRunner, "_stage", stage)
    code, found, _ = verify(models, tmp_path, NGRAM, "--draws", "50", "--partial")
    assert found["host sync"] == ("does not hold" if waits else "holds"), found
    assert found["run-ahead"] == "holds"
    assert found["bubble"] == "not checked"  # the stand-in has no clock
    assert code == int(waits)
    assert num_checked > 0
    assert modes[-1] == "default"


# ---- a server, and more ranks


def test_a_server_is_asked_what_can_be_asked(
    models: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --partial the rest, which is not checked, is no success."""
    flags = ["--prompts", str(models.prompts), "--draws", "100", "--dtype", "float32", *LOAD]
    with served(models.target, tmp_path / "log", "--max-num-seqs", "8") as server:
        asked = ["verify", "--url", f"http://127.0.0.1:{server.port}", *flags]
        assert main(asked) == 1
        first = capsys.readouterr()
        assert main([*asked, "--partial", "--output", str(tmp_path / "report")]) == 0
    report = json.loads((tmp_path / "report" / "verify.json").read_text(encoding="utf-8"))
    found = {check["name"]: check["status"] for check in report["checks"]}
    assert [found[name] for name in ("greedy", "seeds", "echo")] == ["holds"] * 3
    later = ("bubble", "prefix cache", "run-ahead", "host sync", "collectives")
    assert [found[name] for name in later] == ["not checked"] * 5
    assert "does not hold" not in first.out
    assert "--partial" in first.err


@pytest.mark.more
def test_collectives_are_compared_with_two_ranks(models: Models, tmp_path: Path) -> None:
    code, found, _ = verify(models, tmp_path, NGRAM, "--tensor-parallel-size", "2", "--draws", "50")
    assert found["collectives"] == "holds"
    assert code == 0, found


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--url", "http://127.0.0.1:1"]) == 1
    assert "is the server running?" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--max-tokens", "0"], "--max-tokens is 0"),
        (["--url", "http://127.0.0.1:1", "--block-size", "8"], "--block-size"),
        (["--prompts", "/nowhere.txt"], "/nowhere.txt"),
        (["--output", "/dev/null/here"], "--output"),
    ],
)
def test_wrong_usage_ends_with_2(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *flags]) == 2
    assert said in capsys.readouterr().err


def test_sampling_parameters_in_prompts_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a", "temperature": 0.5}', encoding="utf-8")
    assert main(["verify", "--prompts", str(prompts)]) == 2
    assert "sets temperature" in capsys.readouterr().err


def test_a_prompt_that_is_too_long_ends_with_2(
    models: Models, in_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--prompts", str(models.prompts), "--max-tokens", "600", *SIZES]
    assert main(["verify", str(models.target), *flags]) == 2
    assert "max_model_len 512" in capsys.readouterr().err


@pytest.mark.more
def test_an_engine_that_dies_does_not_hold(
    models: Models, in_process: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right, steps = StepRunner.wait, iter(range(1 << 30))

    def dies(self: StepRunner, step: Any) -> Any:
        if next(steps) > 20:
            raise RuntimeError("planted")
        return right(self, step)

    monkeypatch.setattr(StepRunner, "wait", dies)
    code, found, report = verify(models, tmp_path, NGRAM)
    assert code == 1
    assert found["greedy"] == "does not hold"
    # No engine may be compared with itself.
    assert found["prefix cache"] == found["run-ahead"] == "not checked"
    assert "planted" in report["checks"][0]["text"]


@pytest.mark.more
def test_no_drafter_leaves_what_drafts_promise(
    models: Models, in_process: None, tmp_path: Path
) -> None:
    code, found, _ = verify(models, tmp_path, {}, "--draws", "50")
    assert code == 0, found
    assert found["greedy"] == found["chi-square"] == "does not apply"
    assert found["seeds"] == found["echo"] == found["prefix cache"] == "holds"


# ---- how it judges


class FakeTarget:
    """Its logprobs after any text are `table`."""

    def __init__(self, dtype: str, table: dict[int, float]) -> None:
        self.about = About("fake", device="cpu", dtype=dtype)
        self.table = table

    def encode(self, prompt: Any) -> list[int]:
        return []

    def ask(self, asks: Any, concurrency: int | None = None) -> list[Reply]:
        return [Reply([0], last_logprobs=self.table) for _ in asks]

    def take_load(self) -> Load | None:
        return None


def judged(dtype: str, table: dict[int, float], got: list[int]) -> Any:
    proof = Proof(FakeTarget(dtype, table), [[5]], 3, 1, 1, None)
    return compare_greedy(proof, [Reply([1, 2, 3])], [Reply(got)], [Ask([5], {})])


@pytest.mark.parametrize("dtype", TIE_TOLERANCE)
def test_a_near_tie_is_tolerated_in_half_precision_and_shown(dtype: str) -> None:
    near = TIE_TOLERANCE[dtype] / 2
    result = judged(dtype, {2: -1.0, 7: -1.0 - near}, [1, 7, 3])
    assert result.status is Status.HOLDS
    assert result.figures["divergences"][0]["margin"] == pytest.approx(near)
    assert "near tie" in result.text


@pytest.mark.parametrize(
    ("dtype", "table", "got"),
    [
        ("float32", {2: -1.0, 7: -1.0}, [1, 7, 3]),
        ("bfloat16", {2: -1.0, 7: -1.0 - TIE_TOLERANCE["bfloat16"]}, [1, 7, 3]),
        ("bfloat16", {4: -0.1, 7: -0.1}, [1, 7, 3]),  # the expected one is not likely at all
        ("bfloat16", {2: -1.0}, [1]),  # it ended too early
    ],
)
def test_other_divergences_are_not(dtype: str, table: dict[int, float], got: list[int]) -> None:
    assert judged(dtype, table, got).status is Status.FAILS


class WithoutDraftsOtherTokens(FakeTarget):
    """As if a seed gave other tokens with drafts than without."""

    def ask(self, asks: Any, concurrency: int | None = None) -> list[Reply]:
        return [Reply([1 if "num_speculative_tokens" in ask.params else 2] * 3) for ask in asks]


@pytest.mark.parametrize(
    ("draft_sampling", "dtype", "num_prompts", "status"),
    [
        ("greedy", "float32", 1, Status.FAILS),
        ("probabilistic", "float32", 1, Status.HOLDS),  # it promises the distribution only
        ("", "float32", 1, Status.NOT_CHECKED),  # a server that does not say
        ("greedy", "bfloat16", 1, Status.HOLDS),  # two divergences may be rounding
        ("greedy", "bfloat16", 20, Status.FAILS),
    ],
)
def test_seeds_with_other_tokens_are_judged_by_what_was_promised(
    draft_sampling: str, dtype: str, num_prompts: int, status: Status
) -> None:
    target = WithoutDraftsOtherTokens(dtype, {})
    target.about = replace(target.about, draft_sampling=draft_sampling, drafters=("any",))
    assert seeds(Proof(target, [[5]] * num_prompts, 3, 1, 1, None)).status is status


def test_the_first_token_that_differs_is_named() -> None:
    found = differences([Reply([1, 2]), Reply([1, 2])], [Reply([1, 2]), Reply([1, 2, 3])])
    assert found == [Divergence(answer=1, position=2, expected=None, got=3)]


@pytest.mark.parametrize("freedom", [1, 2, 3, 8, 33, 120])
@pytest.mark.parametrize("scale", [0.3, 1.0, 2.5])
def test_the_tail_is_that_of_the_chi_square_distribution(freedom: int, scale: float) -> None:
    value = freedom * scale
    assert chi_square_tail(value, freedom) == pytest.approx(float(stats.chi2.sf(value, freedom)))


def test_rare_tokens_share_a_cell() -> None:
    counts = Counter({1: 52, 2: 30, 3: 10, 4: 5, 5: 3})
    statistic, freedom = chi_square(counts, {1: 0.5, 2: 0.3, 3: 0.05, 4: 0.01})
    expected = [50.0, 30.0, 20.0]
    assert freedom == 2
    assert statistic == pytest.approx(float(stats.chisquare([52, 30, 18], expected).statistic))
    assert chi_square(Counter({1: 100}), {1: 1.0})[1] == 0


def test_a_token_that_cannot_be_drawn_is_noticed() -> None:
    statistic, freedom = chi_square(Counter({1: 50, 9: 50}), {1: 0.5, 2: 0.5})
    assert chi_square_tail(statistic, freedom) < 1e-6


def test_as_many_divergences_as_without_drafts_are_no_excess() -> None:
    assert excess((3, 900), (3, 900)) > 0.5
    assert excess((25, 400), (0, 1000)) < 1e-6
    p = stats.binomtest(6, 8, 1 / 3, alternative="greater").pvalue
    assert excess((6, 500), (2, 1000)) == pytest.approx(float(p))
