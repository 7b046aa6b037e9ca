"""Which schemas of a JSON-Schema-Test-Suite are served, and whether outputs are valid.

Drives the grammar constraints with random tokens instead of a model; half of the tokens are chosen
to come to an end. Outputs are validated with `jsonschema`. Prints one line per refused schema.

    python -m bench.json_schema [FOLDER] [--samples N]

FOLDER has the files of one draft (for example draft7); the default is draft 2020-12, from
tests/data.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema

from paceline.config import EngineConfig
from paceline.engine.front import load_front
from paceline.engine.grammars import Grammars
from paceline.errors import InvalidGrammar
from paceline.request import StructuredOutputsParams
from paceline.text.tokenizer import Tokenizer
from tests.engine.grammar_driving import generate

MAX_TOKENS = 256
KEPT = Path(__file__).parent.parent / "tests" / "data" / "json_schema_2020_12.json"


@dataclass
class Tally:
    num_schemas: int = 0
    refused: list[tuple[str, str]] = field(default_factory=list)  # (schema, reason)
    num_outputs: int = 0
    num_finished: int = 0
    num_unchecked: int = 0
    invalid: list[tuple[str, str]] = field(default_factory=list)  # (schema, output)

    @property
    def served_share(self) -> float:
        return 1 - len(self.refused) / self.num_schemas

    @property
    def finished_share(self) -> float:
        return self.num_finished / max(1, self.num_outputs)


def schemas(folder: Path | None) -> Iterator[tuple[str, str, Any]]:
    if folder is None:
        yield from json.loads(KEPT.read_text(encoding="utf-8"))
        return
    for path in sorted(folder.glob("*.json")):
        for case in json.loads(path.read_text(encoding="utf-8")):
            yield path.stem, case["description"], case["schema"]


def tally(
    grammars: Grammars, tokenizer: Tokenizer, folder: Path | None = None, samples: int = 2
) -> Tally:
    result, rng = Tally(), random.Random(0)
    for name, description, schema in schemas(folder):
        result.num_schemas += 1
        label = f"{name}: {description}"
        params = StructuredOutputsParams(json=json.dumps(schema))
        try:
            grammars.constraint(params)
        except InvalidGrammar as error:
            result.refused.append((label, str(error)))
            continue
        for _ in range(samples):
            tokens, ended = generate(grammars.constraint(params), rng, tokenizer, MAX_TOKENS)
            result.num_outputs += 1
            if ended:
                result.num_finished += 1
                text = tokenizer.decode(tokens)
                verdict = is_valid(text, schema)
                result.num_unchecked += verdict is None
                if verdict is False:
                    result.invalid.append((label, text))
    return result


def is_valid(text: str, schema: Any) -> bool | None:
    """None: the validator cannot say, because Python's `re` lacks \\p of JSON Schema's patterns."""
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    try:
        return bool(kind(schema).is_valid(json.loads(text)))
    except re.error:
        return None
    except ValueError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--samples", type=int, default=3)
    arguments = parser.parse_args()
    config = EngineConfig.from_keywords(model="")
    front = load_front(config)
    assert front.tokenizer is not None
    grammars = Grammars(config, front.tokenizer.vocab_size)
    found = tally(grammars, front.tokenizer, arguments.folder, arguments.samples)
    reasons = Counter(reason for _, reason in found.refused)
    for reason, count in reasons.most_common():
        print(f"{count:4d}  {reason}")
    for label, text in found.invalid:
        print(f"INVALID {label}: {text}")
    print(
        f"{found.num_schemas} schemas, {found.served_share:.1%} served; {found.num_outputs} "
        f"outputs, {found.finished_share:.1%} finished within {MAX_TOKENS} tokens, "
        f"{len(found.invalid)} invalid, {found.num_unchecked} that the validator cannot check"
    )


if __name__ == "__main__":
    main()
