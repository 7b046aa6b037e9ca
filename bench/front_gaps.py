"""What delays tokens in the front process while prompts keep arriving, on this CPU.

usage: python -m bench.front_gaps [--seconds 10] [--running 32] [--rate 8] [--json FILE]

A tiny model with random weights in an engine process of its own; `--running` requests decode, and
other prompts arrive. Twice: with Python's own garbage collection in the front (as before), and as
`open_session` leaves it. Prints the longest gap between two messages of a request, and the longest
of what may cause it: a step by the engine's clock, a collection in the front, a submitted prompt,
the handling of a message, and the time that the operating system kept the front from running.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

from bench.bench_engines import random_prompt, write_record
from paceline.commands.prompts import PromptRecord
from paceline.commands.report import machine
from paceline.commands.session import Answer, Session, open_session
from paceline.config import EngineConfig
from paceline.request import SamplingParams

PYTHONS_THRESHOLDS = (700, 10, 10)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


class Watch:
    """The longest stops of this process, in seconds, by cause."""

    def __init__(self, session: Session) -> None:
        self.longest_s = {"collection": 0.0, "submit": 0.0, "message": 0.0, "not running": 0.0}
        self.num_collections = [0, 0, 0]
        self._session = session
        self._began_s = self._received_s = self._cpu_s = 0.0

    def collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began_s = time.perf_counter()
            return
        self.note("collection", time.perf_counter() - self._began_s)
        self.num_collections[info["generation"]] += 1

    def note(self, cause: str, seconds: float) -> None:
        self.longest_s[cause] = max(self.longest_s[cause], seconds)

    @contextmanager
    def timing(self, cause: str) -> Iterator[None]:
        """Time of the block, and how much of it this process did not run."""
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        yield
        took_s = time.perf_counter() - wall_s
        self.note(cause, took_s)
        self.note("not running", took_s - (time.thread_time() - cpu_s))

    def received(self) -> None:
        self._received_s, self._cpu_s = time.perf_counter(), time.thread_time()

    def pump(self, timeout_s: float) -> None:
        """Take what arrives; the wait for it does not count."""
        self._session.client.pump(timeout_s)
        took_s = time.perf_counter() - self._received_s
        self.note("message", took_s)
        self.note("not running", took_s - (time.thread_time() - self._cpu_s))


@contextmanager
def watching(session: Session, is_frozen: bool) -> Iterator[Watch]:
    watch, thresholds = Watch(session), gc.get_threshold()
    supervisor = session.client._supervisor
    receive = supervisor.receive

    def stamped(timeout_s: float | None) -> Any:
        found = receive(timeout_s)
        watch.received()
        return found

    if not is_frozen:
        gc.unfreeze()
        gc.set_threshold(*PYTHONS_THRESHOLDS)
    gc.callbacks.append(watch.collected)
    try:
        with mock.patch.object(supervisor, "receive", stamped):
            yield watch
    finally:
        gc.callbacks.remove(watch.collected)
        gc.collect()
        if not is_frozen:
            gc.freeze()
            gc.set_threshold(*thresholds)


def measure(session: Session, args: argparse.Namespace, is_frozen: bool) -> dict[str, Any]:
    rng = random.Random(0)

    def submit(tokens: int, output: int) -> Answer:
        ids = random_prompt(rng, session.client.info.vocab_size, tokens)
        params = SamplingParams(
            max_tokens=output, temperature=0.0, ignore_eos=True, detokenize=False
        )
        return session.submit(PromptRecord(token_ids=ids), params)

    steps = session.client.stats.recent
    with watching(session, is_frozen) as watch:
        hosts = [submit(32, 8000) for _ in range(args.running)]
        while not all(host.arrivals for host in hosts):
            watch.pump(0.05)
        steps.clear()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        begin_s = due_s = time.monotonic()
        longest_step_s, guests = 0.0, []
        while time.monotonic() < begin_s + args.seconds and not hosts[0].finished:
            if time.monotonic() >= due_s:
                with watch.timing("submit"):
                    guests.append(submit(128, 16))
                due_s += 1 / args.rate
            watch.pump(max(min(due_s - time.monotonic(), 0.05), 0.0))
            while steps:
                step = steps.popleft()
                longest_step_s = max(longest_step_s, max(step.idle_s, 0.0) + step.busy_s)
        end_s = time.monotonic()
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - faults
    gaps_s = [
        after - before
        for host in hosts
        for (before, _), (after, _) in pairwise(host.arrivals)
        if begin_s <= before and after <= end_s
    ]
    for answer in (*hosts, *guests):
        if not answer.finished:
            session.abort(answer)
    session.wait([*hosts, *guests])
    longest = {**watch.longest_s, "step": longest_step_s, "gap": max(gaps_s, default=0.0)}
    return {
        "garbage": "frozen" if is_frozen else "Python's",
        "messages": len(gaps_s),
        "longest_ms": {cause: round(s * 1e3, 2) for cause, s in sorted(longest.items())},
        "collections": watch.num_collections,
        "switched_out": switches,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--running", type=int, default=32)
    parser.add_argument("--rate", type=float, default=8.0, help="prompts per second")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        config = EngineConfig.from_keywords(
            model=scratch,
            load_format="dummy",
            skip_tokenizer_init=True,
            device="cpu",
            max_model_len=8192,
            max_num_seqs=64,
            cpu_threads=1,
            num_gpu_blocks_override=(args.running + 8) * 512,
            enable_prefix_caching=False,
        )
        with open_session(config) as session:
            measure(session, argparse.Namespace(**{**vars(args), "seconds": 1.0}), True)
            runs = [measure(session, args, is_frozen) for is_frozen in (False, True)]
    for run in runs:
        print(f"{run['garbage']:9} {run['messages']:>7} messages, longest, ms:", run["longest_ms"])
        print(f"{'':9} collections {run['collections']}, switched out {run['switched_out']} times")
    if args.json is not None:
        record = {"bench": "front_gaps", "machine": machine(), "runs": runs}
        write_record(args.json, record, Path(scratch))


if __name__ == "__main__":
    main()
