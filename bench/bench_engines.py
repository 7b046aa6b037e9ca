"""Time per output token of an engine with the vLLM-style offline API, on one GPU.

usage: python bench/bench_engines.py ENGINE CASE[,CASE...] [--bs 1,8,32,64] [--load] [--json FILE]
  ENGINE  importable package with LLM and SamplingParams (paceline, vllm)
  CASE    sm | sm-eagle | l8 | l8-eagle | l8-long | glm | glm-mtp | q30 (Qwen3-30B-A3B)
          glm-spread | glm-spread-mtp (only Paceline: without glm's router bias)
          q35 | q35-mtp (Qwen3.5-9B) | q35-moe | q35-moe-mtp (Qwen3.5-35B-A3B)
          l8-fp8 | q30-fp8 | glm-fp8: with quantization="fp8"

Weights are random. Acceptance is forced to a mean of 2.5 tokens per step (K = 3: one draft always,
another every second time), so that engines do the same work. Prompts of 128 tokens, greedy, no
prefix cache. With random weights the bias of glm's router alone decides, in every engine: all rows
of a step choose the same four experts of a layer. q30's router has no bias: its rows spread over
all experts, as with real weights.
TPOT = (time of 288 tokens - time of 32 tokens) / 256. Medians of at least three runs, and of more
until two seconds are filled. Short and long runs alternate; prompts are new each time.
--prompts also measures prompts of the named sizes, in tokens per second.
--load measures prompts and output under load instead; --contexts measures requests with long
contexts: the median of steps in which every request decodes. Each case has its own engine.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.graph_check import NUM_PROMPTS, PROMPT_TOKENS, GraphCheck
from bench.model_configs import CONFIGS, weight_bytes_per_step, write_configs
from bench.resting import wait_for_rest
from paceline.commands.machine import package_version
from paceline.commands.report import machine, resolved, step_times
from paceline.engine.loop_state import SPARE_AFTER_S

NUM_DRAFTS, TOKENS_PER_STEP = 3, 2.5
SYNTHETIC = {
    "num_speculative_tokens": NUM_DRAFTS,
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_length": TOKENS_PER_STEP,
}
SHORT, LONG = 32, 288
# Of a run over a long context: tokens, and the last steps, in which requests end one by one.
CONTEXT_TOKENS, CONTEXT_END = 160, 32
ENOUGH_S, MOST_RUNS = 2.0, 15
PROMPT_LOADS = ((1, 4096), (8, 2048), (1, 128))
OUTPUT_LOADS = ((256, 512, 128), (1, 4000, 256), (64, 4000, 64))
# vLLM's offline engine keeps no statistics by default, and then its `get_metrics` raises.
ENGINE_KEYWORDS: dict[str, dict[str, Any]] = {"vllm": {"disable_log_stats": False}}
BANDWIDTH_BYTES_S = {"H200": 4.8e12, "H100": 3.35e12}


@dataclass(frozen=True)
class Case:
    """A target and its drafter."""

    model: str
    method: str | None = None
    head: str | None = None
    quantization: str | None = None

    @property
    def vocab_size(self) -> int:
        return int(CONFIGS[self.model]["vocab_size"])

    def speculative_config(self, models: Path) -> dict[str, Any] | None:
        if self.method is None:
            return None
        head = {} if self.head is None else {"model": str(models / self.head)}
        return {"method": self.method, **head, **SYNTHETIC}


CASES = {
    "sm": Case("sm"),
    "sm-eagle": Case("sm", "eagle", "sm-eagle"),
    "l8": Case("l8"),
    "l8-eagle": Case("l8", "eagle", "l8-eagle"),
    "l8-long": Case("l8-long"),
    "glm": Case("glm"),
    "glm-mtp": Case("glm", "mtp"),
    "glm-spread": Case("glm-spread"),
    "glm-spread-mtp": Case("glm-spread", "mtp"),
    "q30": Case("q30"),
    "l8-fp8": Case("l8", quantization="fp8"),
    "q30-fp8": Case("q30", quantization="fp8"),
    "glm-fp8": Case("glm", quantization="fp8"),
    "q35": Case("q35"),
    "q35-mtp": Case("q35", "mtp"),
    "q35-moe": Case("q35-moe"),
    "q35-moe-mtp": Case("q35-moe", "mtp"),
    "tiny": Case("tiny"),
}


def main() -> int:
    args = engine_arguments()
    with tempfile.TemporaryDirectory() as scratch:
        models = Path(args.models or scratch)
        write_configs(models)
        runs = [run_case(args, name, models) for name in args.cases]
    if args.json is not None:
        record = {
            "bench": "engines",
            "engine": {"name": args.engine, "version": engine_version(args.engine)},
            "gpu": gpu(),
            "machine": machine(),
            "arguments": {k: v for k, v in vars(args).items() if k not in ("json", "models")},
            "runs": runs,
        }
        write_record(args.json, record, models)
    return 0 if all(run.get("check", {"ok": True})["ok"] for run in runs) else 1


def write_record(path: Path, record: dict[str, Any], models: Path) -> None:
    """Replace paths of models by their names: a record holds no machine paths."""
    text = json.dumps(record, indent=1).replace(f"{models}/", "")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def engine_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine")
    parser.add_argument("cases", type=lambda text: text.split(","), metavar="CASE[,CASE...]")
    parser.add_argument("--models", metavar="DIR", help="where config.json files are written")
    parser.add_argument("--bs", default="1,8,32,64", help="requests at once")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--sync", action="store_true", help="no run-ahead")
    parser.add_argument("--load", action="store_true", help="prompts and output under load")
    parser.add_argument(
        "--contexts", default="", help="requests and tokens of each, such as 1x64000,8x16000"
    )
    parser.add_argument("--prompts", default="", help="requests and tokens of each, such as 8x2048")
    parser.add_argument(
        "--sampled", default="", help="requests at once, also with temperature 0.8, top_p 0.95"
    )
    parser.add_argument("--eager", action="store_true", help="no graphs")
    parser.add_argument(
        "--check", action="store_true", help="first compare 32 greedy tokens with an eager engine's"
    )
    parser.add_argument("--kv-cache-dtype", metavar="TYPE", help="such as fp8; default: auto")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="another keyword of LLM(...), such as max_num_batched_tokens=4096",
    )
    args = parser.parse_args(argv)
    if unknown := set(args.cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    args.bs = [int(text) for text in args.bs.split(",")]
    args.contexts, args.prompts = sizes(args.contexts), sizes(args.prompts)
    args.sampled = [int(text) for text in args.sampled.split(",") if text]
    return args


def sizes(text: str) -> list[tuple[int, int]]:
    """8x2048,1x64000 as pairs."""
    pairs = (x.split("x") for x in text.split(",") if x)
    return [(int(count), int(length)) for count, length in pairs]


def keywords(args: argparse.Namespace, case: Case, models: Path) -> dict[str, Any]:
    """Keywords of `LLM(...)`: as few as the measurement needs, the same for every engine."""
    longest = 8192 if args.load else max(2048, -(-(args.prompt + LONG) // 256) * 256)
    longest = max(longest, *(length + 256 for _, length in args.contexts + args.prompts), 0)
    asked: dict[str, Any] = {
        "model": str(models / case.model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": longest,
        "max_num_seqs": 256 if args.load else 64 if args.contexts else max(64, *args.bs),
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.85,
        **ENGINE_KEYWORDS.get(args.engine, {}),
    }
    if (spec := case.speculative_config(models)) is not None:
        asked["speculative_config"] = spec
    if case.quantization is not None:
        asked["quantization"] = case.quantization
    if args.sync:
        asked["async_scheduling"] = False
    if args.eager:
        asked["enforce_eager"] = True
    if args.kv_cache_dtype:
        asked["kv_cache_dtype"] = args.kv_cache_dtype
    for text in args.set:
        name, _, value = text.partition("=")
        asked[name] = json.loads(value)
    return asked


def run_case(args: argparse.Namespace, name: str, models: Path) -> dict[str, Any]:
    case, engine = CASES[name], importlib.import_module(args.engine)
    asked = keywords(args, case, models)
    record: dict[str, Any] = {"engine": args.engine, "case": name}
    check = eager_answers(engine, case, asked) if args.check else None
    with opened(engine, asked) as (llm, init_s):
        record["init_s"] = round(init_s, 1)
        bench = Bench(llm, engine.SamplingParams, case.vocab_size)
        bench.run(1, 16)
        record["settled_s"] = settle(llm)
        if check is not None:
            record["check"] = check.compare(llm)
            print("CHECK", json.dumps(record["check"]), flush=True)
            if not record["check"]["ok"]:
                print(f"{name}: tokens with graphs differ from those without", file=sys.stderr)
                return record
        if args.load:
            record |= under_load(bench)
        elif args.contexts:
            record["tpot_ms"] = {
                f"{n}x{length}": bench.context_ms(n, length) for n, length in args.contexts
            }
        else:
            record["tpot_ms"] = {n: bench.time_per_token_ms(n, args.prompt) for n in args.bs}
            record |= prompts_per_s(bench, args.prompts)
        if args.sampled:
            record |= bench.sampled(args.sampled, args.prompt)
    shown = ("engine", "case", "init_s", "tpot_ms", "sampled_tpot_ms")
    line = {k: v for k, v in record.items() if k in shown or k.endswith("tok/s")}
    print("RESULT", json.dumps(line), flush=True)
    if not args.load and not args.contexts:
        record |= bandwidth(case, record["tpot_ms"], bench.tokens_per_step)
    record["steps"] = bench.steps
    print_steps(bench.steps, record.get("bandwidth_share"))
    became = asked_of(llm)
    if became:
        print("  start-up, seconds:", json.dumps(became["runner"]["startup_s"]), flush=True)
    return record | {"keywords": asked} | became


def eager_answers(engine: Any, case: Case, asked: dict[str, Any]) -> GraphCheck:
    rng = random.Random(1)
    prompts = [random_prompt(rng, case.vocab_size, PROMPT_TOKENS) for _ in range(NUM_PROMPTS)]
    is_ours = engine.__name__ == "paceline"  # only Paceline can turn drafts off per request
    check = GraphCheck(engine.SamplingParams, prompts, case.method is not None and is_ours)
    with opened(engine, {**asked, "enforce_eager": True}) as (llm, _):
        check.learn(llm)
    return check


@contextmanager
def opened(engine: Any, asked: dict[str, Any]) -> Iterator[tuple[Any, float]]:
    """(an LLM, seconds until it was ready). Frees the GPU afterwards."""
    started_s = time.perf_counter()
    llm = engine.LLM(**asked)
    try:
        yield llm, time.perf_counter() - started_s
    finally:
        if hasattr(llm, "close"):
            llm.close()
        else:
            llm.llm_engine.engine_core.shutdown()
        gc.collect()


class Bench:
    """Timed calls of one LLM, each with new prompts."""

    def __init__(self, llm: Any, params: Callable[..., Any], vocab_size: int) -> None:
        self._llm = llm
        self._params = params
        self._vocab_size = vocab_size
        self._how = {"temperature": 0.0}
        self._rng = random.Random(0)
        # Step times measured by the engine, by number of requests or by load.
        self.steps: dict[int | str, dict[str, Any]] = {}
        self.tokens_per_step: dict[int | str, float] = {}

    def run(self, batch: int, tokens: int, prompt: int = 128) -> float:
        """Seconds of one `generate`."""
        prompts = [
            {"prompt_token_ids": random_prompt(self._rng, self._vocab_size, prompt)}
            for _ in range(batch)
        ]
        params = self._params(max_tokens=tokens, ignore_eos=True, detokenize=False, **self._how)
        start_s = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        elapsed_s = time.perf_counter() - start_s
        assert all(len(o.outputs[0].token_ids) == tokens for o in outputs), "too few tokens"
        return elapsed_s

    def time_per_token_ms(self, batch: int, prompt: int) -> float:
        """Short and long runs alternate, so that a slow period (a new step shape, a warmer GPU)
        affects both and cancels out in their difference."""
        # The first run meets the step shapes of the prompts.
        self.run(batch, LONG, prompt)
        short_s: list[float] = []
        long_s: list[float] = []
        with self.watched(batch):
            # With forced acceptance runs vary in length, so short ones are repeated more.
            while len(long_s) < 3 or (sum(long_s) < ENOUGH_S and len(long_s) < MOST_RUNS):
                short_s.append(self.run(batch, SHORT, prompt))
                long_s.append(self.run(batch, LONG, prompt))
        return round((median(long_s) - median(short_s)) / (LONG - SHORT) * 1e3, 4)

    def context_ms(self, batch: int, prompt: int) -> float:
        """Per output token: the median of steps in which all requests decode, two runs."""
        self.run(batch, 2, prompt)
        steps_s: list[float] = []
        for _ in range(2):
            stats = self._llm.get_metrics()
            stats.recent.clear()
            self.run(batch, CONTEXT_TOKENS, prompt)
            decoding = list(stats.recent)[-CONTEXT_TOKENS + CONTEXT_END : -CONTEXT_END]
            steps_s += [t.idle_s + t.busy_s for t in decoding if t.idle_s >= 0.0]
        return round(median(steps_s) * 1e3, 4)

    def sampled(self, batches: list[int], prompt: int) -> dict[str, Any]:
        """The same for sampled requests."""
        kept = self._how, self.steps, self.tokens_per_step
        self._how, self.steps, self.tokens_per_step = {"temperature": 0.8, "top_p": 0.95}, {}, {}
        found = {
            "sampled_tpot_ms": {n: self.time_per_token_ms(n, prompt) for n in batches},
            "sampled_steps": self.steps,
            "sampled_tokens_per_step": self.tokens_per_step,
        }
        self._how, self.steps, self.tokens_per_step = kept
        return found

    @contextmanager
    def watched(self, what: int | str) -> Iterator[None]:
        """Record the engine's step times meanwhile, if it has them."""
        if not hasattr(self._llm, "get_metrics"):
            yield
            return
        stats = self._llm.get_metrics()
        if not hasattr(stats, "recent"):
            yield
            return
        stats.recent.clear()
        drafts, accepted = stats.num_drafts, stats.num_accepted_tokens
        yield
        self.steps[what] = step_times(stats.recent)
        drafts, accepted = stats.num_drafts - drafts, stats.num_accepted_tokens - accepted
        self.tokens_per_step[what] = 1 + accepted / drafts if drafts else 1.0


def prompts_per_s(bench: Bench, loads: Sequence[tuple[int, int]]) -> dict[str, int]:
    found = {}
    for batch, prompt in loads:
        what = f"in {batch}x{prompt}"
        bench.run(batch, 1, prompt)
        with bench.watched(what):
            seconds = median(bench.run(batch, 1, prompt) for _ in range(3))
        found[f"{what} tok/s"] = round(batch * prompt / seconds)
    return found


def under_load(bench: Bench) -> dict[str, int]:
    """Tokens per second: in, median of three; out, the better of two."""
    found = prompts_per_s(bench, PROMPT_LOADS)
    for batch, prompt, tokens in OUTPUT_LOADS:
        what = f"out {batch}x{prompt}+{tokens}"
        bench.run(batch, tokens, prompt)
        with bench.watched(what):
            seconds = min(bench.run(batch, tokens, prompt) for _ in range(2))
        found[f"{what} tok/s"] = round(batch * tokens / seconds)
    return found


def bandwidth(
    case: Case, tpot_ms: dict[int, float], tokens_per_step: dict[int | str, float]
) -> dict[str, Any]:
    """Share of the memory bandwidth that reading the weights of a step takes."""
    num_drafts = NUM_DRAFTS if case.method else 0
    num_bytes = weight_bytes_per_step(case.model, case.head, num_drafts, case.quantization)
    peak = next((v for k, v in BANDWIDTH_BYTES_S.items() if k in gpu().get("name", "")), None)
    if num_bytes is None or peak is None:
        return {"weight_bytes_per_step": num_bytes}
    usual = TOKENS_PER_STEP if case.method else 1.0
    share = {
        batch: round(num_bytes / peak / (ms * 1e-3 * tokens_per_step.get(batch, usual)), 4)
        for batch, ms in tpot_ms.items()
    }
    return {
        "weight_bytes_per_step": num_bytes,
        "peak_bytes_per_s": peak,
        "tokens_per_step": {b: round(t, 3) for b, t in tokens_per_step.items()},
        "bandwidth_share": share,
    }


def print_steps(
    steps: dict[int | str, dict[str, Any]], share: dict[int | str, float] | None
) -> None:
    for what, found in steps.items():
        if found:
            weights = f", weights {share[what]:.1%} of bandwidth" if share else ""
            label = what if isinstance(what, str) else f"{what:>4} requests"
            print(
                f"  {label}: step {found['step_ms']['p50']:.3f} ms, idle "
                f"{found['idle_us']['p50']:.1f} us ({found['idle_share']['p50']:.2%}, "
                f"of all {found.get('bubble_share', 0.0):.2%}), host "
                f"{found['host_ms']['p50']:.3f} ms{weights}",
                flush=True,
            )


def settle(llm: Any) -> float:
    """Wait until Paceline has captured its idle-time graphs, so that no timed run captures one.
    Other engines capture at start-up. Returns the seconds it took."""
    client = getattr(llm, "_client", None)
    if client is None:
        return 0.0
    return round(wait_for_rest(client.engine_pids, SPARE_AFTER_S + 0.2), 1)


def asked_of(llm: Any) -> dict[str, Any]:
    """The resolved configuration, if the engine exposes it."""
    client = getattr(llm, "_client", None)
    if client is None:
        return {}
    return {"config": resolved(client.config, client.info), "runner": asdict(client.info)}


def random_prompt(rng: random.Random, vocab_size: int, length: int) -> list[int]:
    return [rng.randrange(5, vocab_size - 5) for _ in range(length)]


def engine_version(name: str) -> str | None:
    return package_version(name) or getattr(importlib.import_module(name), "__version__", None)


def gpu() -> dict[str, str]:
    """From the driver, so that this process needs no CUDA context."""
    fields = ("name", "driver_version", "memory.total")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except OSError:
        return {}
    values = done.stdout.splitlines()[0].split(", ") if done.returncode == 0 else []
    return dict(zip(fields, values, strict=False))


if __name__ == "__main__":
    sys.exit(main())
