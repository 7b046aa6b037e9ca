"""`paceline convert`: a GGUF file as a Hugging Face folder. The work is checkpoint/convert.py."""

from __future__ import annotations

from argparse import Namespace

from paceline.checkpoint.convert import convert_gguf
from paceline.commands.loading import LoadingLine


def run(args: Namespace) -> int:
    line = LoadingLine()
    try:
        files = convert_gguf(
            args.gguf,
            args.folder,
            args.dtype,
            progress=lambda _, fraction: line("Converting", fraction),
        )
    finally:
        line.close()
    for path in files:
        print(path)
    return 0
