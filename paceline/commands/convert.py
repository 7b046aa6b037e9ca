"""`paceline convert`: writes a GGUF file as a Hugging Face folder (checkpoint/convert.py)."""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from pathlib import Path

from paceline.checkpoint.convert import convert_gguf
from paceline.commands.loading import LoadingLine


def run(args: Namespace) -> int:
    line = LoadingLine("Converting")
    name = Path(args.gguf).name
    try:
        files = convert_gguf(
            args.gguf, args.folder, args.dtype, progress=lambda _, fraction: line(name, fraction)
        )
    finally:
        line.close()
    for path in files:
        print(path)
    print(f"Now try: paceline serve {shlex.quote(args.folder)}", file=sys.stderr)
    return 0
