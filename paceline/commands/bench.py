"""`paceline bench`: latency and throughput of the engine.

`bench_serve` measures over HTTP, `bench_sweep` varies load and drafter.
"""

from __future__ import annotations

import random
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from paceline.commands import bench_serve, bench_sweep
from paceline.commands.arguments import engine_config
from paceline.commands.prompts import PromptRecord
from paceline.commands.report import (
    acceptance,
    acceptance_rows,
    engine_rows,
    machine,
    publish,
    resolved,
    short,
    spread,
    spread_rows,
    step_rows,
    step_times,
    token_latencies,
    token_latency_rows,
)
from paceline.commands.session import Answer, Session, open_session
from paceline.errors import ConfigError
from paceline.observe.progress import ProgressLine
from paceline.observe.trace import write_chrome_trace
from paceline.request import SamplingParams


def run(args: Namespace) -> int:
    least = dict.fromkeys(("batch_size", "num_iters", "num_prompts", "input_len", "output_len"), 1)
    for name, low in (least | {"prefix_len": 0}).items():
        value = getattr(args, name, None)
        if value is not None and value < low:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least {low}.")
    if args.kind == "serve":
        return bench_serve.run(args)
    if args.kind == "sweep":
        return bench_sweep.run(args)
    config = engine_config(args)
    trace = _writable(args.trace)
    with open_session(config) as session:
        result, rows = (latency if args.kind == "latency" else throughput)(session, args)
        stats, info = session.client.stats, session.client.info
        spans = session.client.take_trace() if trace is not None else []
    drafts = acceptance(
        stats.num_drafts,
        stats.num_draft_tokens,
        stats.num_accepted_tokens,
        stats.accepted_per_position,
    )
    steps = step_times(stats.recent)
    result |= drafts | {"steps": steps}
    rows = engine_rows(info.model_name, info.device, info.dtype, info.drafter) + rows
    rows += step_rows(steps) + acceptance_rows(drafts)
    record = {
        "bench": args.kind,
        "model": info.model_name,
        "device": info.device,
        "dtype": info.dtype,
        "drafter": info.drafter,
        "config": resolved(config, info),
        "machine": machine(),
        "results": result,
    }
    if trace is not None:
        about = {name: record[name] for name in ("model", "device", "config", "machine")}
        write_chrome_trace(trace, spans, about)
        rows.append(("Trace", f"{trace}, for ui.perfetto.dev"))
    publish(record, rows, args.output_json)
    return 0


def end_warm_up(session: Session, args: Namespace) -> None:
    """End the warm-up: step times and the trace start here."""
    session.client.stats.recent.clear()
    if args.trace is not None:
        session.client.start_trace()


def _writable(path: str | None) -> Path | None:
    """Fail before the measurement if the file cannot be written."""
    if path is None:
        return None
    try:
        Path(path).touch()
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror}.") from None
    return Path(path)


def latency(session: Session, args: Namespace) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Batches of the same size, each with new prompts, so that the prefix cache has no hits."""
    prompts = RandomPrompts(session, args.input_len, args.seed or 0)
    params = _fixed_length(args.output_len)
    progress = ProgressLine(args.num_iters_warmup + args.num_iters, "Batches")
    batch_s: list[float] = []
    answers: list[Answer] = []
    for number in range(args.num_iters_warmup + args.num_iters):
        batch = prompts.take(args.batch_size)
        if number == args.num_iters_warmup:
            end_warm_up(session, args)
        started_s = time.perf_counter()
        batch_answers = [session.submit(prompt, params) for prompt in batch]
        session.wait(batch_answers)
        if number >= args.num_iters_warmup:
            batch_s.append(time.perf_counter() - started_s)
            answers += batch_answers
        progress.update(1, args.batch_size * args.output_len)
    progress.close()
    tokens_per_s = args.batch_size * args.output_len * len(batch_s) / sum(batch_s)
    result = {
        "batch_size": args.batch_size,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "latency_ms": spread(batch_s, 1e3),
        **token_latencies(answers),
        "output_tokens_per_s": round(tokens_per_s, 2),
    }
    rows = [
        ("Batches", f"{len(batch_s)} of {args.batch_size} requests"),
        ("Tokens", f"{args.input_len} in, {args.output_len} out"),
        *spread_rows("Latency of a batch", "ms", result["latency_ms"]),
        *token_latency_rows(result),
        ("Output", f"{short(tokens_per_s)} tok/s"),
    ]
    return result, rows


def throughput(session: Session, args: Namespace) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """All requests at once, timed until the last token."""
    prompts = RandomPrompts(session, args.input_len, args.seed or 0)
    params = _fixed_length(args.output_len)
    session.wait([session.submit(prompt, params) for prompt in prompts.take(1)])  # warm-up
    batch = prompts.take(args.num_prompts)
    progress = ProgressLine(args.num_prompts, "Requests")
    end_warm_up(session, args)
    started_s = time.perf_counter()
    answers = [session.submit(prompt, params) for prompt in batch]
    for answer in answers:
        session.wait([answer])
        progress.update(1, args.output_len)
    elapsed_s = time.perf_counter() - started_s
    progress.close()
    num_out = sum(answer.num_tokens for answer in answers)
    num_in = args.num_prompts * args.input_len
    result = {
        "num_prompts": args.num_prompts,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "elapsed_s": round(elapsed_s, 4),
        "requests_per_s": round(args.num_prompts / elapsed_s, 4),
        "output_tokens_per_s": round(num_out / elapsed_s, 2),
        "total_tokens_per_s": round((num_in + num_out) / elapsed_s, 2),
        **token_latencies(answers),
    }
    rows = [
        (
            "Requests",
            f"{args.num_prompts} in {short(elapsed_s)} s, {short(result['requests_per_s'])}/s",
        ),
        ("Output", f"{short(result['output_tokens_per_s'])} tok/s"),
        ("Input and output", f"{short(result['total_tokens_per_s'])} tok/s"),
        *token_latency_rows(result),
    ]
    return result, rows


class RandomPrompts:
    """Different prompts of random tokens that are not special. Seeded."""

    def __init__(self, session: Session, length: int, seed: int) -> None:
        special = session.client.tokenizer.special_ids if session.client.front.tokenizer else ()
        self._ids = sorted(set(range(session.client.info.vocab_size)) - set(special))
        self._length = length
        self._random = random.Random(seed)

    def take(self, count: int) -> list[PromptRecord]:
        draw = self._random.choices
        return [PromptRecord(token_ids=draw(self._ids, k=self._length)) for _ in range(count)]


def _fixed_length(output_len: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
