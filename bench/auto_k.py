"""`"num_speculative_tokens": "auto"` against no drafts and fixed K, at several loads.

Requests of three classes, whose drafts are accepted with chance 0.9, 0.6 and 0.2 per position
(synthetic acceptance, given per request), keep 1, 4 or 16 slots busy. All variants run the same
requests one after another in each round, so that noise of the machine affects all of them. Prints
medians over the rounds of tokens per second against no drafts and against the best fixed K. On a
CPU the seconds are CPU time of one thread, because other processes disturb it less.

The model and its EAGLE head have random weights. On a GPU: `--device cuda --model l8 --head
l8-eagle --rows 1,8,64,256`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.model_configs import CONFIGS, write_configs
from paceline import LLM, SamplingParams

CHANCES = (0.9, 0.6, 0.2)
MOST = 7
# A model that a CPU steps in a few milliseconds, with the proportions of a large one: a head is a
# small part of it.
_SMALL = {"vocab_size": 8192, "num_hidden_layers": 12}
SMALL = {
    "small": CONFIGS["sm"] | _SMALL,
    "small-eagle": CONFIGS["sm-eagle"] | _SMALL | {"num_hidden_layers": 1},
}


def rates_of(chance: float) -> list[float]:
    """Chances that the first 1, 2, ... drafts are all accepted."""
    return [chance**j for j in range(1, MOST + 1)]


class Engines:
    """Without a drafter, with K by request, and with `auto`."""

    def __init__(self, folder: Path, rows: int, args: argparse.Namespace) -> None:
        synthetic = {
            "method": "eagle",
            "model": str(folder / args.head),
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": rates_of(0.6),
        }
        auto = {"num_speculative_tokens": "auto", "max_num_speculative_tokens": MOST}
        specs: Mapping[str, dict[str, Any] | None] = {
            "none": None,
            "fixed": {**synthetic, "num_speculative_tokens": MOST},
            "auto": {**synthetic, **auto},
        }
        self._llms = {
            name: LLM(
                model=str(folder / args.model),
                load_format="dummy",
                device=args.device,
                skip_tokenizer_init=True,
                max_model_len=512,
                max_num_seqs=rows,
                engine_in_process=True,
                cpu_threads=1,
                speculative_config=spec,
            )
            for name, spec in specs.items()
        }
        self._rows, self._tokens = rows, args.tokens
        self._clock = time.process_time if args.device == "cpu" else time.perf_counter

    def close(self) -> None:
        for llm in self._llms.values():
            llm.close()

    def speed(self, variant: str, seed: int) -> float:
        """Tokens per second of a round, in which each class has the same number of requests."""
        count = len(CHANCES) * max(4, self._rows)  # slots are empty only in the last few steps
        rng = np.random.default_rng(seed)
        prompts = [{"prompt_token_ids": rng.integers(3, 8000, 16).tolist()} for _ in range(count)]
        k = int(variant) if variant.isdigit() else None
        # Of different lengths: equal ones would end together without drafts and only then.
        lengths = rng.integers(self._tokens // 2, 2 * self._tokens, count).tolist()
        params = [
            self._params(CHANCES[i % len(CHANCES)], variant, k, i, lengths[i]) for i in range(count)
        ]
        llm = self._llms["fixed" if k is not None else variant]
        begin_s = self._clock()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = self._clock() - begin_s
        return sum(len(o.outputs[0].token_ids) for o in outputs) / seconds

    def _params(
        self, chance: float, variant: str, k: int | None, seed: int, length: int
    ) -> SamplingParams:
        own = None if variant == "none" else {"synthetic_acceptance_rates": rates_of(chance)}
        return SamplingParams(
            max_tokens=length,
            ignore_eos=True,
            temperature=0.0,
            seed=seed,
            detokenize=False,
            num_speculative_tokens=k,
            speculative=own,
        )


def measure(folder: Path, rows: int, args: argparse.Namespace) -> dict[str, list[float]]:
    variants = ("none", *map(str, args.ks), "auto")
    engines = Engines(folder, rows, args)
    try:
        for variant in (*variants, "auto"):  # warm up; `auto` measures what steps cost
            engines.speed(variant, 0)
        speeds: dict[str, list[float]] = {name: [] for name in variants}
        for number in range(args.rounds):
            for name in variants if number % 2 else reversed(variants):
                speeds[name].append(engines.speed(name, number + 1))
        return speeds
    finally:
        engines.close()


def against(speeds: Mapping[str, Sequence[float]], name: str, other: str) -> float:
    """Median over the rounds of one speed against another of the same round."""
    return median(a / b for a, b in zip(speeds[name], speeds[other], strict=True))


def row_of(rows: int, speeds: Mapping[str, Sequence[float]], ks: Sequence[int]) -> str:
    fixed = [against(speeds, str(k), "none") for k in ks]
    best = str(ks[int(np.argmax(fixed))])
    auto = against(speeds, "auto", "none")
    cells = [*(f"{x:.2f}" for x in fixed), f"**{auto:.2f}**"]
    return f"| {rows} | {' | '.join(cells)} | {against(speeds, 'auto', best):.2f} (K = {best}) |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="small")
    parser.add_argument("--head", default="small-eagle")
    parser.add_argument("--rows", default="1,4,16")
    parser.add_argument("--ks", default="0,1,3,5,7", help="fixed K; 0: a head that drafts nothing")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--tokens", type=int, default=64, help="of a request; half as many to twice as many"
    )
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    args.ks = [int(k) for k in args.ks.split(",")]
    results: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_configs(folder)
        for model, config in SMALL.items():
            (folder / model).mkdir()
            (folder / model / "config.json").write_text(json.dumps(config), encoding="utf-8")
        titles = [f"K = {k}" for k in args.ks]
        print(f"| requests | {' | '.join(titles)} | auto | auto against the best K |")
        print("|---|" + "---|" * (len(args.ks) + 2))
        for rows in map(int, args.rows.split(",")):
            results[str(rows)] = measure(folder, rows, args)
            print(row_of(rows, results[str(rows)], args.ks), flush=True)
    if args.output_json:
        args.output_json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
