"""Times reference and numba version of every CPU kernel, at the sizes of a layer of SmolLM2-135M.

The two alternate, so that a busy machine disturbs both; prints best and median of many calls.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from tests.kernels.cases.cpu import Case, all_cases, pairs


def seconds(function: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    begin = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - begin


def time_case(
    case: Case, reference: Callable[..., Any], fast: Callable[..., Any], budget_s: float
) -> dict[str, Any]:
    """Repeats a call on the same arguments; what a kernel writes there does not change its work."""
    arguments = case.make()
    seconds(reference, arguments)  # warm up, and compile
    seconds(fast, arguments)
    times: tuple[list[float], list[float]] = ([], [])
    begin = time.perf_counter()
    while time.perf_counter() - begin < budget_s or len(times[0]) < 5:
        times[0].append(seconds(reference, arguments))
        times[1].append(seconds(fast, arguments))
    best = [min(t) * 1e6 for t in times]
    middle = [median(t) * 1e6 for t in times]
    return {
        "kernel": case.kernel,
        "case": case.name,
        "reference_us": {"best": round(best[0], 1), "median": round(middle[0], 1)},
        "fast_us": {"best": round(best[1], 1), "median": round(middle[1], 1)},
        "speedup": round(middle[0] / middle[1], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernel", help="only this kernel")
    parser.add_argument("--seconds", type=float, default=0.3, help="per case")
    parser.add_argument("--threads", type=int, default=0, help="default: torch's")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    if options.threads:
        torch.set_num_threads(options.threads)
    twins = pairs(torch.device("cpu"))
    if all(reference is fast for reference, fast in twins.values()):
        print("numba is not installed, so there is nothing to compare.")
        return
    rows = []
    for case in all_cases():
        if case.is_large and options.kernel in (None, case.kernel):
            reference, fast = twins[case.kernel]
            rows.append(time_case(case, reference, fast, options.seconds))
            if not options.json:
                print(_line(rows[-1]))
    if options.json:
        print(json.dumps({"threads": torch.get_num_threads(), "cases": rows}, indent=1))


def _line(row: dict[str, Any]) -> str:
    reference, fast = row["reference_us"], row["fast_us"]
    return (
        f"{row['kernel']:16} {row['case']:18} torch {reference['best']:9.1f} "
        f"(median {reference['median']:9.1f}) us   vector {fast['best']:8.1f} "
        f"(median {fast['median']:8.1f}) us   {row['speedup']:5.1f} x"
    )


if __name__ == "__main__":
    main()
