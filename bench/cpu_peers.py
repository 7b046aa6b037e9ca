"""Paceline, transformers and llama.cpp on this CPU, in one run, taking turns.

Every contender lives in its own process and is idle while another one works. A round asks each
of them the same thing; figures are medians over rounds, ratios are taken round by round.
`--against FOLDER` compares this checkout with another one instead; 1 says that it is slower.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.peers.against import OTHER, ROOT, STEP_MODEL, THIS, Checkout, groups
from bench.peers.cases import EDIT_TOKENS, OURS, Case, cases, choose, entries
from bench.peers.contender import Contender, Entry, Runs
from bench.peers.job import About, Job, Timing
from bench.peers.machine import CpuClock, idle_share
from bench.peers.prompts import Prompts
from bench.peers.verdict import Row, Spread, judge, same_answers, table
from paceline.checkpoint.source import ModelFiles, locate
from paceline.commands.machine import cpu_info
from paceline.commands.report import machine

RESULTS = Path(__file__).resolve().parent / "results" / "cpu"
AGAINST = RESULTS / "against.json"
QUICK_ROUNDS = 2
IDLE_S = 1.0
BUSY = 0.05  # cores: above this, idle contenders or other programs disturb the figures


@dataclass
class Result:
    """The rounds of one case."""

    case: Case
    values: dict[str, list[float]] = field(default_factory=dict)
    # Of the last round: the answers, and the counts of drafts.
    answers: dict[str, list[list[int]]] = field(default_factory=dict)
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    busy_cores: dict[str, float] = field(default_factory=dict)  # by us, by others

    def take(self, name: str, timings: Sequence[Timing]) -> None:
        self.values.setdefault(name, []).append(self.case.measure(timings))
        self.answers[name] = [ids for timing in timings for ids in timing.token_ids]
        names = ("num_tokens", "num_steps", "num_draft_tokens", "num_accepted_tokens")
        self.counts[name] = {n: sum(getattr(t, n) for t in timings) for n in names}

    def rows(self) -> list[Row]:
        found = [judge(bar, self.values) for bar in self.case.bars]
        return [row for row in found if row is not None]

    def record(self) -> dict[str, Any]:
        contenders = {
            name: {**asdict(Spread.of(values)), "values": values, "counts": self.counts[name]}
            for name, values in self.values.items()
        }
        rows = [{**row.record(), "same_answers": self._same(row)} for row in self.rows()]
        return {
            "name": self.case.name,
            "title": self.case.title,
            "unit": self.case.unit,
            "busy_cores": self.busy_cores,
            "contenders": contenders,
            "rows": rows,
        }

    def _same(self, row: Row) -> str:
        return same_answers(self.answers[row.bar.ours], self.answers[row.theirs])

    def cells(self) -> list[list[str]]:
        return [
            [
                self.case.name,
                f"{row.bar.ours} {row.ours_median:.1f}",
                f"{row.theirs} {row.theirs_median:.1f}",
                row.ratio.text(3),
                row.bar.limit_text(row.bar.must),
                row.bar.limit_text(row.bar.reach),
                row.verdict,
                self._same(row),
            ]
            for row in self.rows()
        ]

    def draft_lines(self) -> list[str]:
        lines = []
        for name, count in self.counts.items():
            if count["num_draft_tokens"]:
                rate = count["num_accepted_tokens"] / count["num_draft_tokens"]
                text = f"{self.case.name}: {name}: {rate:.0%} of the drafts accepted"
                if count["num_steps"]:
                    text += f", {count['num_tokens'] / count['num_steps']:.2f} tokens per step"
                lines.append(text)
        return lines


HEAD = ["case", "ours", "theirs", "ratio (min..max)", "must", "reach", "verdict", "same answers"]


def run_case(
    case: Case, contenders: Mapping[str, Runs], prompts: Prompts, rounds: int, quick: bool
) -> Result:
    """Warm up, then run rounds. Odd rounds go backwards, so that no contender is always first."""
    present = [(name, contenders[name]) for name in case.contenders if name in contenders]
    warm_up = case.jobs(prompts, rounds, quick)[0]  # as long as a round, with other prompts
    for _, contender in present:
        contender.run(warm_up)
    result = Result(case)
    clock = CpuClock()
    for number in range(rounds):
        order = present if number % 2 == 0 else present[::-1]
        timings: dict[str, list[Timing]] = {name: [] for name, _ in present}
        for job in case.jobs(prompts, number, quick):
            for name, contender in order:
                timings[name].append(contender.run(job))
        for name, found in timings.items():
            result.take(name, found)
    result.busy_cores = clock.shares()
    return result


def answer_lengths(contender: Runs, prompts: Prompts) -> list[int]:
    """Lengths of Paceline's greedy answers, so that all contenders generate as many tokens and
    none after the end of an answer."""
    jobs = [Job([ids], [EDIT_TOKENS], ignore_eos=False) for ids in prompts.edit]
    return [contender.run(job).num_tokens for job in jobs]


def start(
    wanted: Sequence[str], known: Mapping[str, Entry], stack: ExitStack
) -> tuple[dict[str, Contender], dict[str, About]]:
    """Start the contenders that can run here and print why others cannot. `stack` closes them."""
    contenders: dict[str, Contender] = {}
    for name in wanted:
        entry = known.get(name)
        reason = "needs a GGUF with real weights" if entry is None else entry.why_not()
        if entry is None or reason is not None:
            print(f"without {name}: {reason}")
            continue
        contenders[name] = Contender(entry)
        stack.callback(contenders[name].close)
    about = {}
    for name, contender in contenders.items():
        about[name] = contender.wait()
        print(f"ready: {name}: {about[name].description}", flush=True)
    return contenders, about


def model_options(args: argparse.Namespace) -> tuple[ModelFiles, dict[str, object]]:
    """The model's files, and the options of every engine of Paceline."""
    options = {"model": args.model, "load_format": args.load_format}
    engine: dict[str, object] = {name: value for name, value in options.items() if value}
    if args.load_format == "dummy":
        engine["skip_tokenizer_init"] = True
    return locate(args.model, load_format=args.load_format or "auto"), engine


def idle_shares(contenders: Mapping[str, Contender]) -> dict[str, float]:
    shares = {name: round(idle_share(c.pid, IDLE_S), 3) for name, c in contenders.items()}
    for name, share in shares.items():
        if share > BUSY:
            print(f"warning: {name} is idle but uses {share:.2f} cores")
    return shares


def run(args: argparse.Namespace, threads: int) -> dict[str, Any]:
    """The whole benchmark, as the record that is written."""
    files, engine = model_options(args)
    chosen = choose(cases(threads), args.only)
    prompts = Prompts(files)
    known = entries(files, engine, threads)
    wanted = list(dict.fromkeys(name for case in chosen for name in case.contenders))
    results: list[Result] = []
    with ExitStack() as stack:
        contenders, about = start(wanted, known, stack)
        idle = idle_shares(contenders)
        for case in chosen:
            if case.name in ("n-gram", "lookup.edit") and not prompts.edit_lengths:
                prompts.edit_lengths = answer_lengths(contenders[OURS], prompts)
            results.append(run_rounds(case, contenders, prompts, args))
    show(results)
    return {
        **head_of_record(args, threads, files),
        "idle_cores": idle,
        "contenders": {name: asdict(what) for name, what in about.items()},
        "cases": [result.record() for result in results],
    }


def run_against(args: argparse.Namespace, threads: int) -> dict[str, Any]:
    """This checkout and another one, a pair of equal engines at a time."""
    files, engine = model_options(args)
    engine["model"] = str(files.gguf or files.folder)  # one file for both, whatever their defaults
    prompts = Prompts(files)
    folders = {THIS: ROOT, OTHER: args.against.resolve()}
    results: list[Result] = []
    about: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        step_model = Path(folder)
        (step_model / "config.json").write_text(json.dumps(STEP_MODEL), encoding="utf-8")
        pairs = groups(engine, threads, step_model)
        chosen = choose([case for group in pairs for case in group.cases], args.only)
        for group in pairs:
            cases_here = [case for case in group.cases if case in chosen]
            if not cases_here:
                continue
            with ExitStack() as stack:
                contenders = {
                    name: stack.enter_context(Checkout(folder, group.options))
                    for name, folder in folders.items()
                }
                about = {name: contender.wait() for name, contender in contenders.items()}
                for case in cases_here:
                    results.append(run_rounds(case, contenders, prompts, args))
    show(results)
    return {
        **head_of_record(args, threads, files),
        "contenders": about,
        "cases": [result.record() for result in results],
    }


def run_rounds(
    case: Case, contenders: Mapping[str, Runs], prompts: Prompts, args: argparse.Namespace
) -> Result:
    rounds = args.rounds or (QUICK_ROUNDS if args.quick else case.rounds)
    print(f"{case.name}: {rounds} rounds", flush=True)
    return run_case(case, contenders, prompts, rounds, args.quick)


def head_of_record(args: argparse.Namespace, threads: int, files: ModelFiles) -> dict[str, Any]:
    return {
        "bench": "cpu_peers",
        "quick": args.quick,
        "threads": threads,
        "model": files.name,
        "machine": machine(),
    }


def is_slower(record: Mapping[str, Any]) -> bool:
    """Whether a ratio of the run missed what it must reach."""
    return any(row["verdict"] == "miss" for case in record["cases"] for row in case["rows"])


def show(results: Sequence[Result]) -> None:
    cells = [line for result in results for line in result.cells()]
    print()
    if cells:
        print(table([HEAD, *cells]))
    for result in results:
        print(f"{result.case.name} [{result.case.unit}]: {result.case.title}")
    for line in (line for result in results for line in result.draft_lines()):
        print(line)
    for result in results:
        if (others := result.busy_cores["others"]) > BUSY:
            print(f"warning: {result.case.name}: others used {others:.2f} cores; run it again")


def default_file(threads: int) -> Path:
    """Named by what was measured on, never by whose machine it is."""
    cpu = re.sub(r"[^a-z0-9.]+", "-", re.sub(r"\(\w+\)", "", cpu_info()[0].lower())).strip("-")
    return RESULTS / f"{cpu}-{threads}-threads.json"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    names = ", ".join(dict.fromkeys(case.name.partition(".")[0] for case in cases(2)))
    parser.add_argument("--only", action="append", default=[], metavar="CASE", help=names)
    parser.add_argument("--rounds", type=int, help="rounds of every case")
    parser.add_argument(
        "--quick", action="store_true", help="two short rounds, to see whether it runs"
    )
    parser.add_argument("--threads", type=int, help="threads of every contender; default all cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="a full run has a default")
    parser.add_argument("--model", default="", help="as for `paceline serve`")
    parser.add_argument("--load-format", default=None, help="dummy measures Paceline alone")
    parser.add_argument(
        "--against",
        type=Path,
        metavar="FOLDER",
        help="compare with this checkout of Paceline; exits with 1 where this one is slower",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    threads = args.threads or len(os.sched_getaffinity(0))
    record = run(args, threads) if args.against is None else run_against(args, threads)
    is_full = not (args.quick or args.only or args.rounds or args.model)
    default = default_file(threads) if args.against is None else AGAINST
    file = args.json or (default if is_full else None)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"written: {file}")
    return int(args.against is not None and is_slower(record))


if __name__ == "__main__":
    raise SystemExit(main())
