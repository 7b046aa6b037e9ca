"""What a viewer of /v1/live costs: CPU time of the engine's loop per step, with one and without.

The engine is a real one in a process of its own, over a runner that computes nothing, so that the
loop is all that uses the CPU there. The viewer is what the server does: record, read four times
per second, encode. Each round measures without, with, and without again. The second and the first
measurement without a viewer should be equal, so their ratio shows how much is noise.

usage: python -m bench.live_cost [--rows N] [--seconds S] [--rounds N]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median, quantiles

from paceline.engine.client import EngineClient
from paceline.observe.trace import TraceRing
from paceline.request import SamplingParams
from paceline.server.live import INTERVAL_S, LiveFeed
from paceline.server.options import ServerOptions
from paceline.server.replies import to_event
from paceline.server.service import Service
from tests.engine.echo_client import echo_client


def cpu_s(pid: int) -> float:
    """CPU time of all threads of a process so far; finer than the ticks of /proc/PID/stat."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text(encoding="utf-8").split()[0]) for file in files) / 1e9


def measure(client: EngineClient, seconds: float, feed: LiveFeed | None) -> tuple[float, float]:
    """Microseconds of the loop per step, and the server's CPU time for frames as a share."""
    stats, (pid,) = client.stats, client.engine_pids
    if feed is not None:
        client.on_trace = feed.take_spans
        client.start_trace()
    steps, used_s = stats.num_steps, cpu_s(pid)
    began_s = last_s = time.perf_counter()
    frames_s = 0.0
    while time.perf_counter() < began_s + seconds:
        client.pump(0.01)
        now_s = time.perf_counter()
        if feed is not None and now_s - last_s >= INTERVAL_S:
            last_s = now_s
            before_s = time.thread_time()
            to_event(feed.frame(client))
            client.read_trace()
            frames_s += time.thread_time() - before_s
    if feed is not None:
        client.read_trace(stop=True)
    per_step = (cpu_s(pid) - used_s) / (stats.num_steps - steps)
    return per_step * 1e6, frames_s / seconds


def spread(ratios: list[float]) -> str:
    low, middle, high = (q - 1 for q in quantiles(ratios, n=4))
    return f"{middle:+.1%} ({low:+.1%} to {high:+.1%})"


def span_us(count: int = 200_000) -> float:
    """CPU time to record one span."""
    ring = TraceRing()
    began_s = time.thread_time()
    for step in range(count):
        ring.add("commit", step, 1.0, 2.0)
    return (time.thread_time() - began_s) / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=21)
    args = parser.parse_args()
    behaviour = f"slots={args.rows} max_len=1000000 pages=1000000 delay_s=0.001 k=3"
    before, ratios, controls, shares = [], [], [], []
    with echo_client(behaviour, in_process=False) as client:
        service = Service(ServerOptions())
        service.attach(client)
        feed = LiveFeed(service)
        params = SamplingParams(max_tokens=900_000, ignore_eos=True, detokenize=False)
        for i in range(args.rows):
            client.submit(f"r{i}", [1, 2, 3, 4], params, on_deltas=lambda _: None)
        measure(client, 1.0, None)
        for _ in range(args.rounds):
            first, _ = measure(client, args.seconds, None)
            viewed, share = measure(client, args.seconds, feed)
            last, _ = measure(client, args.seconds, None)
            before.append(first)
            ratios.append(2 * viewed / (first + last))
            controls.append(last / first)
            shares.append(share)
        service.close()
    print(f"{args.rows} rows, median (and quartiles) of {args.rounds} rounds of {args.seconds:g} s")
    print(f"loop, CPU time per step without a viewer: {median(before):.1f} us")
    print(f"the same with a viewer:                   {spread(ratios)}")
    print(f"without a viewer, measured again:         {spread(controls)}")
    print(f"one span of a step:                       {span_us():.2f} us")
    print(f"server thread, CPU time for frames:       {median(shares):.2%} of a core")


if __name__ == "__main__":
    main()
