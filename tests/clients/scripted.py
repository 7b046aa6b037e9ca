"""`paceline serve` over the scripted model, as a process."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.clients.script import TEMPLATE
from tests.e2e.serving import SPECIAL, VOCAB, ServerProcess, started, train_tokenizer

MODEL = "scripted"
PROGRAM = [sys.executable, "-m", "tests.clients.serve"]


def save_scripted(folder: Path) -> None:
    """The files that the front reads; there are no weights."""
    folder.mkdir(exist_ok=True)
    train_tokenizer().save(str(folder / "tokenizer.json"))
    tokens = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2]}
    files = {
        "tokenizer_config.json": {**tokens, "chat_template": TEMPLATE},
        "config.json": {"model_type": "llama", "vocab_size": VOCAB},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")


@contextlib.contextmanager
def scripted_server(folder: Path, *flags: str) -> Iterator[ServerProcess]:
    """A server that is ready. At its end it has logged no error."""
    save_scripted(folder / "model")
    arguments = ["serve", str(folder / "model"), "--port", "0", "--served-model-name", MODEL]
    log = folder / "log"
    with started([*arguments, *flags], log, program=PROGRAM) as process:
        process.await_ready()
        yield process
        said = process.said()
        assert "Traceback" not in said, said
        assert " 500 " not in said, said
