"""Time from `LLM(...)` to ready: once without cached kernels, then with the kernels of that start.

usage: python bench/start_up.py CASE[,CASE...] [--json FILE]

Cases are those of bench_engines, with random weights; each start is a separate process. All starts
of a case must give the same tokens, whether kernels are compiled or loaded from the cache.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.bench_engines import (
    CASES,
    asked_of,
    engine_arguments,
    gpu,
    keywords,
    opened,
    write_record,
)
from bench.model_configs import write_configs
from paceline.commands.report import machine

NUM_WARM = 2
_CACHES = ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "NUMBA_CACHE_DIR")
PROMPT, NUM_TOKENS = list(range(10, 42)), 8


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", type=lambda text: text.split(","), metavar="CASE[,CASE...]")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="of LLM")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    parser.add_argument("--once", metavar="DIR", help=argparse.SUPPRESS)  # a start of a run
    args = parser.parse_args()
    if unknown := set(args.cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if args.once:
        print(json.dumps(start(args.cases[0], Path(args.once), args.set)), flush=True)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        write_configs(Path(scratch))
        runs = [run_case(name, scratch, args.set) for name in args.cases]
        if args.json is not None:
            record = {"bench": "start_up", "gpu": gpu(), "machine": machine(), "runs": runs}
            write_record(args.json, record, Path(scratch))
    return 0 if all(run["ok"] for run in runs) else 1


def run_case(name: str, models: str, settings: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        starts = [start_apart(name, models, cache, settings) for _ in range(1 + NUM_WARM)]
    tokens = [found.pop("tokens") for found in starts]
    is_ok = all(x == tokens[0] for x in tokens)
    print(f"{name}: {starts[0]['init_s']:.1f} s with no kernel cached, then", end=" ")
    print(", ".join(f"{x['init_s']:.1f}" for x in starts[1:]), "s", flush=True)
    for kind, found in (("no cache", starts[0]), ("cached", starts[-1])):
        print(f"  {kind}:", json.dumps(found["startup_s"]), flush=True)
    if not is_ok:
        print(f"{name}: starts give different tokens: {tokens}", file=sys.stderr)
    return {"case": name, "ok": is_ok, "no_cache": starts[0], "cached": starts[1:]}


def start_apart(name: str, models: str, cache: str, settings: list[str]) -> dict[str, Any]:
    """`start` in a process whose compilers keep their files in `cache`."""
    places = (f"{variable}={cache}" for variable in _CACHES)
    command = ["env", *places, sys.executable, "-m", "bench.start_up", name, "--once", models]
    command += [word for text in settings for word in ("--set", text)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def start(name: str, models: Path, settings: list[str]) -> dict[str, Any]:
    import paceline

    arguments = ["paceline", name, *(word for text in settings for word in ("--set", text))]
    asked = keywords(engine_arguments(arguments), CASES[name], models)
    with opened(paceline, asked) as (llm, init_s):
        params = paceline.SamplingParams(
            temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False
        )
        (output,) = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
        became = asked_of(llm)["runner"]["startup_s"]
    return {
        "init_s": round(init_s, 2),
        "startup_s": became,
        "tokens": output.outputs[0].token_ids,
    }


if __name__ == "__main__":
    sys.exit(main())
