"""This checkout of Paceline against another one, in short turns, so that only the code differs.

A pair of engines with the same options is open at a time. A round is one short job for each, and
the next round goes the other way round. A ratio of a round is the only figure that counts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bench.peers.cases import Case, Jobs
from bench.peers.contender import ContenderFailed
from bench.peers.job import (
    Job,
    Measure,
    Timing,
    decode_rate,
    first_token_ms,
    step_cpu_us,
    throughput,
)
from bench.peers.prompts import Prompts
from bench.peers.verdict import Bar
from paceline.speculation import DEFAULT_SPECULATION

ROOT = Path(__file__).resolve().parents[2]
THIS, OTHER = "this", "other"
LEAST = 0.97  # of the other's speed
ROUNDS = 21
SAMPLED = {"temperature": 0.8, "top_p": 0.95}
PENALISED = {"presence_penalty": 0.2, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
NGRAM = {**DEFAULT_SPECULATION, "adaptive": False}
_SCRIPT = Path(__file__).with_name("checkout_peer.py")
_CLOSE_S = 20.0
# Small, so that little of a step's time is the model's; the vocabulary is that of a real one.
STEP_MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


@dataclass(frozen=True)
class Group:
    """Cases that one pair of engines runs."""

    options: Mapping[str, Any]
    cases: Sequence[Case]


class Checkout(AbstractContextManager["Checkout"]):
    """A checkout of Paceline in its own process, with one engine. It loads on its own; `wait`
    returns when it is ready."""

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        self._folder = folder
        # -P: the folder of the script holds modules of ours, which it must not import.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._send({"folder": str(folder), "options": dict(options)})

    def wait(self) -> dict[str, Any]:
        """What it is; once, before the first job."""
        return self._receive()

    def run(self, job: Job) -> Timing:
        common = {"temperature": job.temperature, "top_p": job.top_p, "seed": job.seed}
        common |= {"ignore_eos": job.ignore_eos, **job.further}
        params = [{**common, "max_tokens": limit} for limit in job.max_tokens]
        self._send({"prompts": [list(ids) for ids in job.prompts], "params": params})
        return Timing(**self._receive())

    def _send(self, value: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ContenderFailed(f"{self._folder} ended with code {self._process.wait(_CLOSE_S)}")
        answer: dict[str, Any] = json.loads(line)
        if "failure" in answer:
            raise ContenderFailed(f"{self._folder} failed:\n{answer['failure']}")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # ends its loop
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def groups(engine: Mapping[str, Any], threads: int, step_model: Path) -> list[Group]:
    """Every case of the comparison. `step_model` is a folder with STEP_MODEL as config.json."""
    base = {**engine, "cpu_threads": threads}
    draft = {"method": "draft_model", "model": engine["model"], "num_speculative_tokens": 3}
    draft |= {"adaptive": False}
    coin = {**draft, "draft_sample_method": "probabilistic"}
    alone = {"model": str(step_model), "load_format": "dummy", "skip_tokenizer_init": True}
    alone |= {"cpu_threads": 1, "engine_in_process": True, "max_num_seqs": 8}
    return [
        Group(base, _plain_cases()),
        Group({**base, "speculative_config": NGRAM}, [_case("n-gram", "edit prompts", _edits)]),
        Group(
            {**base, "speculative_config": draft},
            [_case("draft-greedy", "the model drafts for itself, K 3, greedy", _chats(1, 48))],
        ),
        Group(
            {**base, "speculative_config": coin},
            [_case("draft-sampled", "as draft-greedy, all sampled", _chats(1, 48, **SAMPLED))],
        ),
        Group(alone, [_step_case(0, 1), _step_case(0, 8)]),
        Group({**alone, "speculative_config": NGRAM}, [_step_case(5, 1), _step_case(5, 8)]),
    ]


def _plain_cases() -> list[Case]:
    penalised = {**SAMPLED, "further": {**PENALISED, "logprobs": 5}}
    return [
        _case("one-request", "one request, greedy", _chats(1, 48)),
        _case("batch-8", "8 requests, greedy: all tokens / all time", _chats(8, 24), throughput),
        Case(
            "ttft-512",
            "time to the first token of a fresh prompt of 512 tokens",
            "ms",
            lambda prompts, number, quick: [Job([prompts.random(512, number)], [1])],
            first_token_ms,
            (Bar(THIS, (OTHER,), must=round(1 / LEAST, 3), lower_is_better=True),),
            ROUNDS,
        ),
        _case("sampled-chat", "one request, temperature 0.8, top_p 0.95", _chats(1, 48, **SAMPLED)),
        _case(
            "penalties-logprobs",
            "4 requests, sampled, three penalties, 5 logprobs: all tokens / all time",
            _chats(4, 32, **penalised),
            throughput,
        ),
    ]


def _case(name: str, title: str, jobs: Jobs, measure: Measure = decode_rate) -> Case:
    return Case(name, title, "tok/s", jobs, measure, (Bar(THIS, (OTHER,), must=LEAST),), ROUNDS)


def _step_case(k: int, rows: int) -> Case:
    def jobs(prompts: Prompts, number: int, quick: bool) -> list[Job]:
        # Prompts that repeat themselves, so that n-gram drafts are found.
        short = [prompts.random(8, number, row) for row in range(rows)]
        batch = [[token % STEP_MODEL["vocab_size"] for token in ids] * 4 for ids in short]
        num_steps = 32 if quick else 200
        return [Job(batch, [num_steps * (k + 1)] * rows)]

    return Case(
        f"step-cpu.k{k}-rows{rows}",
        f"CPU time of a greedy step outside of model and lm_head, K {k}, rows: {rows}",
        "us",
        jobs,
        step_cpu_us,
        (Bar(THIS, (OTHER,), must=round(1 / LEAST, 3), lower_is_better=True),),
        ROUNDS,
    )


def _chats(count: int, tokens: int, **options: Any) -> Jobs:
    def jobs(prompts: Prompts, number: int, quick: bool) -> list[Job]:
        chat = prompts.chat
        batch = [chat[(count * number + i) % len(chat)] for i in range(count)]
        return [Job(batch, [tokens // 2 if quick else tokens] * count, seed=number, **options)]

    return jobs


def _edits(prompts: Prompts, number: int, quick: bool) -> list[Job]:
    return [Job([prompts.edit[number % len(prompts.edit)]], [48 if quick else 96])]
