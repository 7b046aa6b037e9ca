"""The CPU benchmark as a program: rounds take turns, prompts stay fixed, and it runs."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.cpu_peers import is_slower, run_case
from bench.peers.against import OTHER, THIS, Checkout, groups
from bench.peers.cases import OURS, SYNC, Case, cases, choose
from bench.peers.contender import ContenderFailed, Entry
from bench.peers.job import Job, Timing, throughput
from bench.peers.prompts import DATA, Prompts
from bench.peers.verdict import Bar
from paceline.checkpoint.source import ModelFiles
from tests.tiny import tiny_config

ROOT = Path(__file__).resolve().parents[2]
# Written before the first measurement. Another hash means another benchmark: give it a new name.
FIXED = {
    "edit_and_quote.jsonl": "89862f34eff3ab3b150b96f79038be23057667e80177544b83f0c341fbbc1fc7",
    "chat_40.jsonl": "0ef7b4b47150a94b91dac045f77adb8d5d225449364ccb99d3001435c18e3a2c",
    "schemas_40.jsonl": "8eb5f7785da009cfc96dbc62043d15bf7cad1c8c0cc9e2166d75a259360bfc6a",
    "drafters_24.jsonl": "c04e94dc294f1a0002b1dcc4278be1c5e5a9587b6692c317c50dd6dd478140fc",
}


def prompts() -> Prompts:
    return Prompts(ModelFiles("tiny", "hf", Path(), None, [], {"vocab_size": 96}))


class Recorder:
    """Takes `seconds` for any job and writes down who was asked what."""

    def __init__(self, name: str, seconds: float, log: list[tuple[str, Job]]) -> None:
        self._name = name
        self._seconds = seconds
        self._log = log

    def run(self, job: Job) -> Timing:
        self._log.append((self._name, job))
        count = len(job.prompts)
        ids = [[1] * limit for limit in job.max_tokens]
        return Timing([0.0] * count, [self._seconds] * count, ids)


def two_jobs(_: Prompts, number: int, quick: bool) -> list[Job]:
    return [Job([[number, i]], [10]) for i in range(2)]


def test_contenders_take_turns_within_a_round_and_change_order_between_rounds() -> None:
    log: list[tuple[str, Job]] = []
    case = Case("x", "x", "tok/s", two_jobs, throughput, (Bar("a", ("b",), must=2.0),), rounds=2)
    contenders = {"a": Recorder("a", 1.0, log), "b": Recorder("b", 4.0, log)}
    result = run_case(case, contenders, prompts(), 2, quick=False)
    names = "".join(name for name, _ in log)
    assert names == "ab" + "abab" + "baba"  # warm-up, round 0, round 1
    asked = {name: [job.prompts for n, job in log if n == name] for name in "ab"}
    assert asked["a"] == asked["b"]
    warm_up, rounds = asked["a"][0], asked["a"][1:]
    assert warm_up not in rounds
    (row,) = result.rows()
    assert row.ratio.median == 4.0
    assert result.values == {"a": [10.0, 10.0], "b": [2.5, 2.5]}


def test_random_prompts_repeat_with_their_seed_and_hold_ordinary_tokens() -> None:
    source = prompts()
    first = source.random(32, 1)
    assert first == source.random(32, 1)
    assert first != source.random(32, 2)
    assert all(48 <= token < 96 for token in first)


@pytest.mark.parametrize(("name", "digest"), FIXED.items())
def test_the_prompts_are_those_that_were_fixed_first(name: str, digest: str) -> None:
    assert hashlib.sha256((DATA / name).read_bytes()).hexdigest() == digest


@pytest.mark.parametrize(
    ("name", "count"),
    [("edit_and_quote.jsonl", 10), ("chat_40.jsonl", 40), ("drafters_24.jsonl", 24)],
)
def test_every_prompt_is_one_message_with_an_id_of_its_own(name: str, count: int) -> None:
    lines = [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]
    assert len({line["id"] for line in lines}) == count
    for line in lines:
        (message,) = line["messages"]
        assert message["role"] == "user"
        assert message["content"].strip()


def test_only_takes_a_case_or_a_group_of_cases() -> None:
    every = cases(2)
    assert [case.name for case in choose(every, ["run-ahead"])] == ["run-ahead.1", "run-ahead.8"]
    assert [case.name for case in choose(every, ["ttft-512"])] == ["ttft-512"]
    assert not any(case.is_side for case in choose(every, []))
    with pytest.raises(SystemExit, match="there are one-request"):
        choose(every, ["nothing"])


def test_a_missing_peer_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    reason = Entry("llama.cpp flash", "llama.cpp").why_not()
    assert reason is not None
    assert "pip install '.[bench]'" in reason


def run_quick(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The program's exit status and its record, for a tiny model with random weights."""
    config = tiny_config("llama", architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder / "model")
    file = folder / "result.json"
    common = ["--quick", "--threads", "1", "--json", str(file)]
    common += ["--model", str(folder / "model"), "--load-format", "dummy"]
    done = subprocess.run(
        [sys.executable, "bench/cpu_peers.py", *common, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert file.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(file.read_text(encoding="utf-8"))


def test_quick_run_ahead_runs_with_a_dummy_model(tmp_path: Path) -> None:
    status, record = run_quick(tmp_path, "--only", "run-ahead")
    assert status == 0
    assert [case["name"] for case in record["cases"]] == ["run-ahead.1", "run-ahead.8"]
    for case in record["cases"]:
        (row,) = case["rows"]
        assert row["same_answers"] == ("1/1" if case["name"].endswith("1") else "8/8")
        values = case["contenders"]
        pairs = zip(values[OURS]["values"], values[SYNC]["values"], strict=True)
        low, high = sorted(ours / theirs for ours, theirs in pairs)
        assert row["ratio"]["median"] == pytest.approx((low + high) / 2)
    resolved = record["contenders"][SYNC]["details"]["config"]
    assert (resolved["run_ahead"], resolved["cpu_threads"]) == (0, 1)
    assert record["machine"]["cpu"]


@pytest.mark.more
def test_against_measures_the_other_folders_paceline(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(ROOT / "paceline", other / "paceline")
    (other / "paceline" / "__init__.py").write_text(
        (ROOT / "paceline" / "__init__.py").read_text(encoding="utf-8")
        + '\n__version__ = "0.other"\n',
        encoding="utf-8",
    )
    status, record = run_quick(tmp_path, "--against", str(other), "--only", "step-cpu.k5-rows8")
    assert record["contenders"][OTHER]["version"] == "0.other"
    assert record["contenders"][THIS]["version"] != "0.other"
    (case,) = record["cases"]
    (row,) = case["rows"]
    assert row["same_answers"] == "8/8"
    for name in (THIS, OTHER):
        assert case["contenders"][name]["median"] > 0
        assert case["contenders"][name]["counts"]["num_accepted_tokens"] > 0
    assert status == int(row["verdict"] == "miss")  # so short a run may go either way


@pytest.mark.parametrize(
    ("seconds", "slower"), [(10.0, False), (10.25, False), (10.4, True), (9.0, False)]
)
def test_a_checkout_is_slower_below_97_percent(seconds: float, slower: bool) -> None:
    log: list[tuple[str, Job]] = []
    contenders = {THIS: Recorder(THIS, seconds, log), OTHER: Recorder(OTHER, 10.0, log)}
    case = Case("x", "x", "tok/s", two_jobs, throughput, (Bar(THIS, (OTHER,), must=0.97),), 2)
    record = {"cases": [run_case(case, contenders, prompts(), 2, quick=False).record()]}
    assert is_slower(record) == slower


def test_every_case_between_checkouts_is_held_against_97_percent_over_21_rounds() -> None:
    found = [case for group in groups({"model": "m"}, 2, Path("m")) for case in group.cases]
    assert {case.name.partition(".")[0] for case in found} == {
        *("one-request", "batch-8", "ttft-512", "n-gram", "sampled-chat", "penalties-logprobs"),
        *("draft-greedy", "draft-sampled", "step-cpu"),
    }
    for case in found:
        (bar,) = case.bars
        assert case.rounds >= 21
        assert bar.must == (1.031 if bar.lower_is_better else 0.97)


def test_a_folder_without_paceline_is_named(tmp_path: Path) -> None:
    with (
        Checkout(tmp_path, {}) as contender,
        pytest.raises(ContenderFailed, match=f"not from {tmp_path}"),
    ):
        contender.wait()
