"""Runs a server at twice its saturation and reports what it saw.

usage: python tests/run_soak.py [--minutes 30] [--seed 1]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # started as a script, its own folder is there

from tests.faults.soak import soak  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    folder = ROOT / ".pytest_cache"
    folder.mkdir(exist_ok=True)
    log = folder / f"soak_{args.seed}.log"
    report = soak(folder / "faults_models", log, 60 * args.minutes, args.seed)
    print(report)
    return 1 if report.complaints or any(report.after.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
