"""A recorded trace of plans: a change that means to change no policy proves "same plans".

After a change that does mean to: `python -m tests.scheduler.test_golden_plans` writes it again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.engine.harness import Harness, golden, request
from tests.fakes import runner_info

TRACE = Path(__file__).with_name("golden_plans.json")


def run_scenario() -> list[dict[str, Any]]:
    """Chunks, prefix hits, speculation, an abort, a preemption for pages, run-ahead 1."""
    info = runner_info(num_pages=14, page_size=4, num_slots=3, max_model_len=48, max_k=2)
    harness = Harness(info, depth=1, max_num_batched_tokens=12, seed=5)
    long_prompt = [i % 50 for i in range(20)]
    arrivals = {
        0: request(1, long_prompt, max_tokens=14),
        1: request(2, [*long_prompt[:10], 51, 52], max_tokens=16, num_speculative_tokens=1),
        2: request(3, [53, 54, 55], max_tokens=18),
        6: request(4, long_prompt[:9], max_tokens=3),
    }
    turn = 0
    while harness.turn() or turn <= max(arrivals):
        if turn in arrivals:
            harness.add(arrivals[turn])
        if turn == 9:
            harness.engine.abort(4)
        turn += 1
    harness.check_idle()
    harness.check_outputs()
    assert harness.num_preemptions > 0
    return [golden(plan) for plan in harness.runner.plans]


def test_plans_equal_the_recorded_trace() -> None:
    recorded = json.loads(TRACE.read_text(encoding="utf-8"))
    plans = run_scenario()
    for plan, wanted in zip(plans, recorded, strict=False):
        assert plan == wanted
    assert len(plans) == len(recorded)


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(plan) for plan in run_scenario())
    TRACE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
