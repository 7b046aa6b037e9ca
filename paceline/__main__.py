"""`python -m paceline` is the same program as `paceline`. Owns nothing."""

from __future__ import annotations

import sys

from paceline.cli import main

if __name__ == "__main__":
    sys.exit(main())
