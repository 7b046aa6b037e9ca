"""Drafters on the default model and this CPU, without or with a head: tokens per step, speed.

Engines take turns, one kind of prompts after the other, so that a slow period of the machine
affects all. Speed is relative to the engine without a drafter in the same round: by the clock, and
by CPU time, which other programs disturb less. Figures are medians over rounds. All engines must
give the same tokens, which is checked. `writing` is sampled with seeds: greedy answers of a small
model fall into loops, which favour drafts. The prompts of all rounds are the same, so "past
answers" shows questions that are asked again.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from paceline import LLM, SamplingParams

DATA = Path(__file__).parent / "data"
KINDS = {"edit": 0.0, "code": 0.0, "math": 0.0, "writing": 0.8}  # temperature
PAST = {"suffix_decoding_max_cached_requests": 100}


def drafters(k: int, head: str | None = None) -> dict[str, dict[str, Any] | None]:
    def spec(method: Any, **more: Any) -> dict[str, Any]:
        return {"method": method, "num_speculative_tokens": k, **more}

    found = {
        "none": None,
        "ngram": spec("ngram"),
        "suffix": spec("suffix"),
        "ngram + suffix": spec(["ngram", "suffix"]),
        "suffix, past answers": spec("suffix", **PAST),
    }
    if head is not None:
        auto = {"num_speculative_tokens": "auto", "max_num_speculative_tokens": k}
        found["eagle"] = spec("eagle", model=head)
        found["eagle, auto"] = spec("eagle", model=head) | auto
        found["suffix + eagle"] = spec(["suffix", "eagle"], model=head)
        found["suffix + eagle, fixed K"] = spec(["suffix", "eagle"], model=head, adaptive=False)
    return found


@dataclass
class Figures:
    """One drafter, one kind of prompts."""

    seconds: list[tuple[float, float]] = field(default_factory=list)  # by round: clock, CPU
    num_tokens: int = 0  # of one round
    num_steps: int = 0
    num_drafts: int = 0
    num_accepted: int = 0


def prompts(count: int, half: str = "both") -> dict[str, list[Any]]:
    """`half`: "tune" are the even ones of each kind, "test" the odd ones."""
    found: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    for name in ("edit_and_quote.jsonl", "drafters_24.jsonl"):
        for line in (DATA / name).read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            found["edit" if name.startswith("edit") else entry["kind"]].append(entry["messages"])
    part = {"both": slice(None), "tune": slice(0, None, 2), "test": slice(1, None, 2)}[half]
    return {kind: messages[part][:count] for kind, messages in found.items()}


def ask(
    llm: LLM, kind: str, messages: list[Any], num_tokens: int, batch: int
) -> tuple[Any, tuple[float, float]]:
    params = [
        SamplingParams(max_tokens=num_tokens, temperature=KINDS[kind], seed=number)
        for number in range(len(messages))
    ]
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    outputs = [
        llm.chat(messages[at : at + batch], params[at : at + batch], use_tqdm=False)
        for at in range(0, len(messages), batch)
    ]
    seconds = (time.perf_counter() - start_s, time.process_time() - start_cpu_s)
    return [output for some in outputs for output in some], seconds


def measure(args: argparse.Namespace) -> dict[str, dict[str, Figures]]:
    """By kind of prompts, then by drafter."""
    known = drafters(args.k, args.head)
    specs = {name: spec for name, spec in known.items() if name in args.drafters}
    llms = {
        name: LLM(speculative_config=spec, cpu_threads=args.threads, engine_in_process=True)
        for name, spec in specs.items()
    }
    asked = prompts(args.prompts, args.half)
    found = {kind: {name: Figures() for name in llms} for kind in asked}
    for number in range(-1, args.rounds):  # the first one warms up
        for kind, messages in asked.items():
            answers = {}
            for name in list(llms) if number % 2 else list(llms)[::-1]:
                num_tokens = args.tokens if number >= 0 else 8
                outputs, seconds = ask(llms[name], kind, messages, num_tokens, args.batch)
                answers[name] = [list(output.outputs[0].token_ids) for output in outputs]
                if number >= 0:
                    take(found[kind][name], outputs, seconds)
            assert len({str(tokens) for tokens in answers.values()}) == 1, f"{kind}: other tokens"
    for llm in llms.values():
        llm.close()
    return found


def take(figures: Figures, outputs: Any, seconds: tuple[float, float]) -> None:
    figures.seconds.append(seconds)
    metrics = [output.metrics for output in outputs]
    figures.num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    figures.num_steps = sum(m.num_steps for m in metrics)
    figures.num_drafts = sum(m.num_draft_tokens for m in metrics)
    figures.num_accepted = sum(m.num_accepted_tokens for m in metrics)


def rows(found: dict[str, dict[str, Figures]]) -> list[dict[str, Any]]:
    table = []
    for kind, by_drafter in found.items():
        for name, figures in by_drafter.items():
            pairs = list(zip(by_drafter["none"].seconds, figures.seconds, strict=True))
            ratios, by_cpu = ([base[i] / own[i] for base, own in pairs] for i in (0, 1))
            table.append(
                {
                    "prompts": kind,
                    "drafter": name,
                    "tokens_per_step": round(figures.num_tokens / figures.num_steps, 2),
                    "accepted": round(figures.num_accepted / max(figures.num_drafts, 1), 2),
                    "speed": round(median(ratios), 3),
                    "speed_by_cpu_time": round(median(by_cpu), 3),
                    "by_round": [round(ratio, 3) for ratio in (*ratios, *by_cpu)],
                }
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafters", nargs="+", metavar="NAME", help="all, unless given")
    parser.add_argument("--head", help="an EAGLE head: alone, and in a chain (bench/train_head.py)")
    parser.add_argument("--half", default="both", choices=["both", "tune", "test"], help="prompts")
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--prompts", type=int, default=8, help="of each kind")
    parser.add_argument("--batch", type=int, default=1, help="requests at a time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    known = drafters(1, args.head)
    if unknown := sorted(set(args.drafters or ()) - known.keys()):
        parser.error(f"unknown drafter {unknown[0]!r}; use {', '.join(known)}")
    args.drafters = list(dict.fromkeys(["none", *(args.drafters or known)]))
    table = rows(measure(args))
    print("| prompts | drafter | tokens per step | accepted | speed | by CPU time |")
    print("|---|---|---|---|---|---|")
    for row in table:
        cells = (row["prompts"], row["drafter"], row["tokens_per_step"], row["accepted"])
        print("|", " | ".join(map(str, cells)), f"| {row['speed']} | {row['speed_by_cpu_time']} |")
    if args.json:
        settings = {name: getattr(args, name) for name in ("k", "tokens", "prompts", "batch")}
        args.json.write_text(json.dumps({**settings, "rows": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
