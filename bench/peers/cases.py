"""The cases: contenders, jobs, measure and required ratios. Data only.

The title and the measure of a case define its figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.peers.contender import Entry
from bench.peers.job import Job, Measure, decode_rate, first_token_ms, throughput
from bench.peers.prompts import Prompts
from bench.peers.verdict import Bar
from paceline.checkpoint.source import ModelFiles
from paceline.speculation import DEFAULT_SPECULATION

OURS, SYNC, NGRAM = "paceline", "paceline run-ahead 0", "paceline n-gram"
TRANSFORMERS = "transformers"
LLAMA = ("llama.cpp flash", "llama.cpp no-flash")
LLAMA_NGRAM = "llama.cpp n-gram"
EDIT_TOKENS = 200
LOOKUPS = [(k, low, high) for k in (3, 5, 8) for low, high in ((1, 3), (2, 4), (3, 5))]

Jobs = Callable[[Prompts, int, bool], list[Job]]  # prompts, number of the round, quick


@dataclass(frozen=True)
class Case:
    """`--only` takes the name or the part before a dot."""

    name: str
    title: str
    unit: str
    jobs: Jobs
    measure: Measure
    bars: tuple[Bar, ...]
    rounds: int
    # Side cases are for tuning and run only with `--only`.
    is_side: bool = False

    @property
    def contenders(self) -> list[str]:
        """In the order of the bars, each once."""
        names = [name for bar in self.bars for name in (bar.ours, *bar.theirs)]
        return list(dict.fromkeys(names))


def _one(prompts: Prompts, number: int, quick: bool) -> list[Job]:
    chat = prompts.chat
    return [Job([chat[number % len(chat)]], [32 if quick else 128])]


def _eight(prompts: Prompts, number: int, quick: bool) -> list[Job]:
    chat = prompts.chat
    batch = [chat[(8 * number + i) % len(chat)] for i in range(8)]
    return [Job(batch, [16 if quick else 64] * 8)]


def _long_prompt(prompts: Prompts, number: int, quick: bool) -> list[Job]:
    return [Job([prompts.random(512, number)], [1])]


def _edits(prompts: Prompts, number: int, quick: bool) -> list[Job]:
    pairs = list(zip(prompts.edit, prompts.edit_lengths, strict=True))
    return [Job([ids], [length]) for ids, length in (pairs[:3] if quick else pairs)]


def _short(count: int) -> Jobs:
    def jobs(prompts: Prompts, number: int, quick: bool) -> list[Job]:
        batch = [prompts.random(16, number, i) for i in range(count)]
        return [Job(batch, [16 if quick else 32] * count)]

    return jobs


def _chat(temperature: float) -> Jobs:
    def jobs(prompts: Prompts, number: int, quick: bool) -> list[Job]:
        chosen = prompts.chat[:6] if quick else prompts.chat
        return [
            Job([ids], [96], ignore_eos=False, temperature=temperature, top_p=0.95, seed=i)
            for i, ids in enumerate(chosen)
        ]

    return jobs


def _lookup_name(k: int, low: int, high: int) -> str:
    return f"n-gram {low}..{high} K={k}"


def cases(threads: int) -> list[Case]:
    """All of them, in the order of the table."""
    return [*_against_peers(), *_against_ourselves(), *_side_cases(threads)]


def _against_peers() -> list[Case]:
    return [
        Case(
            "one-request",
            "one request, no drafts: tokens after the first / time from first to last token",
            "tok/s",
            _one,
            decode_rate,
            (Bar(OURS, (TRANSFORMERS,), must=2.0, reach=3.0), Bar(OURS, LLAMA)),
            rounds=7,
        ),
        Case(
            "batch-8",
            "8 requests at once, no drafts: all tokens / time from submission to the last token",
            "tok/s",
            _eight,
            throughput,
            (
                Bar(OURS, (TRANSFORMERS,), must=2.5, reach=4.0),
                Bar(OURS, LLAMA, must=1.3, reach=1.8),
            ),
            rounds=5,
        ),
        Case(
            "ttft-512",
            "time from submission to the first token, fresh prompt of 512 tokens",
            "ms",
            _long_prompt,
            first_token_ms,
            (
                Bar(OURS, (TRANSFORMERS,), must=1.0, lower_is_better=True),
                Bar(OURS, LLAMA, must=0.6, reach=0.4, lower_is_better=True),
            ),
            rounds=9,
        ),
        Case(
            "n-gram",
            "ten edit and quote prompts, one at a time: tokens after the first / their time",
            "tok/s",
            _edits,
            decode_rate,
            (
                Bar(NGRAM, (OURS,), must=2.0, reach=3.0),
                Bar(NGRAM, LLAMA, must=0.9, reach=1.3),
                Bar(NGRAM, (LLAMA_NGRAM,)),
            ),
            rounds=3,
        ),
    ]


def _against_ourselves() -> list[Case]:
    chat_bar = Bar(NGRAM, (OURS,), must=0.95)
    no_loss = Bar(OURS, (SYNC,), must=1.0)
    return [
        Case(
            "run-ahead.1",
            "run-ahead 1 against 0, one request of 16 + 32 tokens: all tokens / all time",
            "tok/s",
            _short(1),
            throughput,
            (no_loss,),
            rounds=40,
        ),
        Case(
            "run-ahead.8",
            "run-ahead 1 against 0, 8 requests of 16 + 32 tokens: all tokens / all time",
            "tok/s",
            _short(8),
            throughput,
            (no_loss,),
            rounds=40,
        ),
        Case(
            "chat-40.sampled",
            "40 chat prompts, one at a time, temperature 0.8: tokens after the first / their time",
            "tok/s",
            _chat(0.8),
            decode_rate,
            (chat_bar,),
            rounds=2,
        ),
        Case(
            "chat-40.greedy",
            "40 chat prompts, one at a time, greedy: tokens after the first / their time",
            "tok/s",
            _chat(0.0),
            decode_rate,
            (chat_bar,),
            rounds=1,
        ),
    ]


def _side_cases(threads: int) -> list[Case]:
    few_threads = tuple(Bar(f"{OURS} {n} threads", (OURS,)) for n in range(1, threads))
    lookups = tuple(Bar(_lookup_name(*lookup), (OURS,)) for lookup in LOOKUPS)
    return [
        Case(
            "threads.1",
            "fewer threads, one request of 16 + 32 tokens: all tokens / all time",
            "tok/s",
            _short(1),
            throughput,
            few_threads,
            rounds=15,
            is_side=True,
        ),
        Case(
            "threads.8",
            "fewer threads, 8 requests of 16 + 32 tokens: all tokens / all time",
            "tok/s",
            _short(8),
            throughput,
            few_threads,
            rounds=15,
            is_side=True,
        ),
        Case(
            "lookup.edit",
            "n-gram lengths and K on the ten edit and quote prompts: decode rate",
            "tok/s",
            _edits,
            decode_rate,
            lookups,
            rounds=1,
            is_side=True,
        ),
        Case(
            "lookup.chat",
            "n-gram lengths and K on the 40 chat prompts, temperature 0.8: decode rate",
            "tok/s",
            _chat(0.8),
            decode_rate,
            lookups,
            rounds=1,
            is_side=True,
        ),
    ]


def entries(files: ModelFiles, engine: dict[str, object], threads: int) -> dict[str, Entry]:
    """Every contender by name. Peers need real weights, llama.cpp a GGUF."""
    base = {**engine, "cpu_threads": threads}
    found = [
        Entry(OURS, "paceline", base),
        Entry(SYNC, "paceline", {**base, "run_ahead": 0}),
        Entry(NGRAM, "paceline", {**base, "speculative_config": DEFAULT_SPECULATION}),
    ]
    for n in range(1, threads):
        found.append(Entry(f"{OURS} {n} threads", "paceline", {**base, "cpu_threads": n}))
    for k, low, high in LOOKUPS:
        spec = {**DEFAULT_SPECULATION, "num_speculative_tokens": k}
        spec |= {"prompt_lookup_min": low, "prompt_lookup_max": high}
        name = _lookup_name(k, low, high)
        found.append(Entry(name, "paceline", {**base, "speculative_config": spec}))
    if engine.get("load_format") != "dummy":
        gguf = None if files.gguf is None else str(files.gguf)
        source = {"model": gguf or str(files.folder), "threads": threads}
        found.append(Entry(TRANSFORMERS, "transformers", source))
        if gguf is not None:
            found += _llama_entries(gguf, threads)
    return {entry.name: entry for entry in found}


def _llama_entries(gguf: str, threads: int) -> list[Entry]:
    common: dict[str, object] = {"gguf": gguf, "threads": threads}
    flash, no_flash = LLAMA
    return [
        Entry(flash, "llama.cpp", {**common, "flash_attention": True}),
        Entry(no_flash, "llama.cpp", {**common, "flash_attention": False}),
        Entry(
            LLAMA_NGRAM,
            "llama.cpp",
            {**common, "flash_attention": True, "drafter": "ngram_simple"},
        ),
    ]


def choose(all_cases: Sequence[Case], only: Sequence[str]) -> list[Case]:
    """The cases named by `only`, or all but side cases."""
    if not only:
        return [case for case in all_cases if not case.is_side]
    groups = {case.name: case.name.partition(".")[0] for case in all_cases}
    for wanted in only:
        if wanted not in groups and wanted not in groups.values():
            known = ", ".join(dict.fromkeys(groups.values()))
            raise SystemExit(f"--only {wanted}: no such case; there are {known}.")
    return [case for case in all_cases if case.name in only or groups[case.name] in only]
