"""The text of docs/reference/python.md, from the signatures, docstrings and comments of
`paceline.__all__`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

import paceline
from paceline.errors import PacelineError
from paceline.request import Logprob, RequestMetrics

INTRO = """# Python API

Written by `make docs` from the code; do not edit. `from paceline import LLM, SamplingParams`.

The engine runs in other processes. They do not import your script, so it needs no
`if __name__ == "__main__":` guard. [examples/](../../examples) has scripts to begin with.
"""
OPTIONS = """
**Options.** `LLM(...)` takes every engine flag of `paceline serve` with underscores instead of
dashes: `LLM("Qwen/Qwen3-8B", tensor_parallel_size=2, max_model_len=8192)`. The
[command line](cli.md) lists them. An unknown name raises `ConfigError` and suggests the nearest
one. Without `model` the built-in one is used. Unlike `paceline serve`, `LLM()` loads no drafter
unless `speculative_config` says so ([drafters](../howto/speculation.md)).
"""
ERRORS = """
## Errors

Every deliberate error is a `PacelineError`. The message says what is wrong and what to do.

```text
{tree}
```
"""


def python_api() -> str:
    lines = [INTRO, "## LLM", "", _paragraph(paceline.LLM), OPTIONS]
    for name, member in vars(paceline.LLM).items():
        if inspect.isfunction(member) and (name == "__init__" or not name.startswith("_")):
            lines += _method(name, member)
    lines += ["An `LLM` is a context manager: `with LLM() as llm:` closes the engine at the end."]
    kinds = (paceline.SamplingParams, paceline.StructuredOutputsParams, paceline.RequestOutput)
    for kind in (*kinds, paceline.CompletionOutput, RequestMetrics, Logprob):
        lines += ["", f"## {kind.__name__}", "", _paragraph(kind), "", *_fields(kind)]
    tree = inspect.getdoc(inspect.getmodule(PacelineError)) or ""
    lines += [ERRORS.format(tree=tree.partition("\n\n")[2])]
    return "\n".join(lines).rstrip() + "\n"


def _method(name: str, member: Any) -> Iterator[str]:
    shown = "LLM(...)" if name == "__init__" else f"llm.{name}"
    signature = str(_without_self(member)).removesuffix(" -> None")
    yield from (f"### {shown}", "", "```python", shown.removesuffix("(...)") + signature, "```", "")
    if member.__doc__:
        yield from (_paragraph(member), "")


class _Plain(str):
    """An annotation that is shown without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _without_self(function: Any) -> inspect.Signature:
    signature = inspect.signature(function)
    kept = [
        p.replace(annotation=_Plain(p.annotation))
        for p in signature.parameters.values()
        if p.name not in ("self", "unsupported")
    ]
    return signature.replace(parameters=kept, return_annotation=_Plain(signature.return_annotation))


def _fields(kind: type[Any]) -> Iterator[str]:
    assert is_dataclass(kind)
    comments = dict(_comments(kind))
    yield from ("| field | type | default | |", "|---|---|---|---|")
    for field in fields(kind):
        note = comments.get(field.name, "").replace("|", "\\|")
        kind_text = str(field.type).replace("|", "\\|")
        yield f"| `{field.name}` | `{kind_text}` | {_default(field)} | {note} |"


def _default(field: Field[Any]) -> str:
    if field.default_factory is not MISSING:
        return f"`{field.default_factory()!r}`"
    return "" if field.default is MISSING else f"`{field.default!r}`"


def _comments(kind: type[Any]) -> Iterator[tuple[str, str]]:
    """What the source says beside or above each field."""
    above: list[str] = []
    for line in inspect.getsource(kind).splitlines():
        if re.match(r"    (def|@)", line):
            return
        code, _, comment = line.partition("#")
        if not code.strip() and comment:
            above.append(comment.strip())
            continue
        if found := re.match(r"    (\w+): ", code):
            yield found[1], " ".join([*above, comment.strip()]).strip()
        above = []


def _paragraph(thing: Any) -> str:
    return inspect.cleandoc(thing.__doc__)
