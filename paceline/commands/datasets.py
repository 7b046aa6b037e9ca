"""Prompts of a benchmark: random ones, and the data sets of vLLM's `bench serve` and of guidellm.

`open_dataset` reads the file. The prompts are made when a tokenizer is there: lengths are in
tokens, or in words if a server has no /tokenize.
"""

from __future__ import annotations

import csv
import json
import math
import random
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from paceline.commands.prompts import SOURCES, PromptRecord, json_object, prompt_from, read_text
from paceline.errors import ConfigError, nearest
from paceline.request import SamplingParams

DEFAULT_OUTPUT_LEN = 128
Tokenize = Callable[[str], list[int]]
MakePrompts = Callable[[Tokenize | None], Iterator[PromptRecord]]
Dataset = Callable[[Tokenize | None], list[PromptRecord]]
Row = Mapping[str, Any]

# guidellm's names of columns, then vLLM's.
_TEXT_COLUMNS = ("prompt", "instruction", "question", "input", "context", "content", "text")
_PREFIX_COLUMNS = ("system_prompt", "system", "prefix")
_FIXED_LENGTH_COLUMNS = ("output_tokens_count", "completion_tokens_count")  # ignore_eos, as there
_LIMIT_COLUMN = "output_tokens"
_SAMPLING = {field.name for field in fields(SamplingParams)}
_BINARY = (".parquet", ".arrow", ".hdf5", ".h5", ".db", ".tar")
# vLLM leaves out conversations outside these numbers of tokens.
_SHAREGPT_LEAST, _SHAREGPT_MOST_IN, _SHAREGPT_MOST = 4, 1024, 2048
_SONNET_INPUT, _SONNET_OUTPUT, _SONNET_PREFIX = 550, 150, 200  # vLLM's defaults
_SONNET_TASK = "Choose the best of these lines of poems and write them down:\n"
_WORDS = (
    "time year people way day man thing woman life child world school state family student "
    "group country problem hand part place case week company system program question work "
    "government number night point home water room mother area money story fact month lot right "
    "study book eye job word business issue side kind head house service friend father power "
    "hour game line"
)


def open_dataset(args: Namespace) -> Dataset:
    """Reads the data set now. The result makes `args.num_prompts` prompts of it, repeating some if
    it is too short."""
    make = _maker(args)

    def prompts(tokenize: Tokenize | None) -> list[PromptRecord]:
        found = list(islice(make(tokenize), args.num_prompts))
        if not found:
            raise ConfigError(f"{args.dataset} holds no usable prompt.")
        if args.chat:
            found = [prompt.as_message() for prompt in found]
        return list(islice(cycle(found), args.num_prompts))

    return prompts


def _maker(args: Namespace) -> MakePrompts:
    name, given = args.dataset_name, args.dataset
    if name == "random" and given is not None:
        raise ConfigError("--dataset-name random reads no file; leave out --dataset.")
    if given is None:
        if name not in (None, "random"):
            raise ConfigError(f"--dataset-name {name} needs its file: --dataset-path FILE.")
        prompt = _Lengths(128 if args.input_len is None else args.input_len)
        output = _Lengths(args.output_len or DEFAULT_OUTPUT_LEN)
        return _Synthetic(prompt, output, args.prefix_len or 0, args.seed or 0, args.chat).prompts
    options = _spec(given)
    if options is not None and "path" not in options:
        return _Synthetic.read(options, args).prompts
    path = options["path"] if options is not None else given
    if name == "sonnet":
        return _sonnet(read_text(path).splitlines(), args)
    rows = _rows(path)
    is_sharegpt = rows and rows[0].keys() & {"conversations", "conversation"}
    if name == "sharegpt" or (name is None and is_sharegpt):
        return _sharegpt(path, rows, args)
    used = enumerate(rows[: args.num_prompts], 1)
    found = [_from_row(f"{path}: row {i}", row, args) for i, row in used]
    return lambda _: iter(found)


def _spec(text: str) -> dict[str, str] | None:
    """guidellm's `key=value,key=value` or JSON object; None if `text` is the path of a file."""
    if text.lstrip().startswith("{"):
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"--dataset {text}: not JSON: {error}.") from None
        return {key: str(value) for key, value in found.items()}
    if "=" not in text or Path(text).exists():
        return None
    pairs = [part.partition("=") for part in text.split(",")]
    return {key.strip(): value.strip() for key, _, value in pairs}


@dataclass(frozen=True)
class _Lengths:
    """A number of tokens: fixed, normal if there is a stdev, or uniform between low and high."""

    mean: int
    stdev: float = 0.0
    low: int | None = None
    high: int | None = None

    def draw(self, rng: random.Random) -> int:
        low = self.low or 1
        if self.stdev:
            high = self.high or self.mean + 5 * self.stdev
            return round(min(max(rng.gauss(self.mean, self.stdev), low), high))
        if self.low is None and self.high is None:
            return self.mean
        return rng.randint(low, self.high or 2 * self.mean - low)


@dataclass(frozen=True)
class _Synthetic:
    """Random words. Answers to them have no natural end, so their length is fixed."""

    prompt: _Lengths
    output: _Lengths
    prefix_len: int  # tokens that all prompts begin with
    seed: int
    as_text: bool  # for messages, which have no token ids

    @classmethod
    def read(cls, options: dict[str, str], args: Namespace) -> _Synthetic:
        names = [f"{kind}_tokens{part}" for kind in ("prompt", "output") for part in _PARTS]
        known = [*names, "prefix_tokens", "kind", "samples"]
        for key in options:
            if key not in known:
                hint = nearest(key, known)
                raise ConfigError(f"--dataset has no {key}; it takes {', '.join(known)}.{hint}")
        if options.get("kind", "synthetic_text") != "synthetic_text":
            raise ConfigError(f"--dataset kind={options['kind']} needs path=FILE.")
        if "prompt_tokens" not in options:
            raise ConfigError("--dataset needs prompt_tokens, as in prompt_tokens=256.")
        output = _lengths("output", options) or _Lengths(DEFAULT_OUTPUT_LEN)
        if args.output_len is not None:
            output = _Lengths(args.output_len)
        prompt = _lengths("prompt", options)
        assert prompt is not None
        prefix_len = args.prefix_len or int(_number("prefix_tokens", options) or 0)
        return cls(prompt, output, prefix_len, args.seed or 0, args.chat)

    def prompts(self, tokenize: Tokenize | None) -> Iterator[PromptRecord]:
        rng, words = random.Random(self.seed), _WORDS.split()
        ids = tokenize(" ".join(words)) if tokenize and not self.as_text else None
        pool: list[Any] = ids or words
        prefix = rng.choices(pool, k=self.prefix_len)
        while True:
            drawn = prefix + rng.choices(pool, k=self.prompt.draw(rng))
            fixed = {"max_tokens": self.output.draw(rng), "ignore_eos": True}
            if ids:
                yield PromptRecord(token_ids=drawn, sampling=fixed)
            else:
                yield PromptRecord(text=" ".join(drawn), sampling=fixed)


_PARTS = ("", "_stdev", "_min", "_max")


def _lengths(kind: str, options: dict[str, str]) -> _Lengths | None:
    mean, stdev, low, high = (_number(f"{kind}_tokens{part}", options) for part in _PARTS)
    if mean is None:
        return None
    if mean < 1 or (low or 1) > (high or mean):
        raise ConfigError(f"--dataset: {kind}_tokens must be at least 1, and _min at most _max.")
    return _Lengths(int(mean), stdev or 0.0, int(low) if low else None, int(high) if high else None)


def _number(key: str, options: dict[str, str]) -> float | None:
    if key not in options:
        return None
    try:
        number = float(options[key])
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"--dataset: {key} must be a number, got {options[key]!r}.")
    return number


def _rows(path: str) -> list[Row]:
    """The rows of a CSV, JSON or JSONL file; of any other file, its lines as prompts."""
    suffix = Path(path).suffix.lower()
    if suffix in _BINARY:
        raise ConfigError(f"{path}: {suffix} files are not read; write it as JSONL or CSV.")
    text = read_text(path)
    lines = [line for line in text.splitlines() if line.strip()]
    if suffix == ".csv":
        columns = {*_TEXT_COLUMNS, *_PREFIX_COLUMNS, *_FIXED_LENGTH_COLUMNS, _LIMIT_COLUMN}
        found = csv.DictReader(text.splitlines(keepends=True))
        return [{k: v for k, v in row.items() if k in columns and v} for row in found]
    if text.lstrip()[:1] not in ("{", "["):
        return [{"prompt": line} for line in lines]
    try:
        whole = json.loads(text)
    except ValueError:
        return [json_object(f"{path}: row {i}", line) for i, line in enumerate(lines, 1)]
    rows = _only_list(whole)
    if not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{path}: every row must be a JSON object.")
    return rows


def _only_list(value: Any) -> list[Any]:
    """A list, or the one list of objects in an object, or a file of one row."""
    if isinstance(value, list):
        return value
    lists = [v for v in value.values() if isinstance(v, list) and v and isinstance(v[0], dict)]
    return (
        lists[0] if len(lists) == 1 and not value.keys() & {*SOURCES, "conversations"} else [value]
    )


def _from_row(where: str, row: Row, args: Namespace) -> PromptRecord:
    """A prompt by the names of its columns. Of the others, sampling parameters have an effect."""
    asked = {key: row[key] for key in SOURCES if row.get(key) is not None}
    if not asked:
        column = next((name for name in _TEXT_COLUMNS if row.get(name) is not None), None)
        if column is None:
            found = ", ".join(row) or "none"
            raise ConfigError(f"{where} has no column {', '.join(_TEXT_COLUMNS)}; found {found}.")
        asked = {"prompt": row[column]}
    prefix = next((row[name] for name in _PREFIX_COLUMNS if row.get(name)), "")
    if "prompt" in asked and prefix:
        asked["prompt"] = f"{prefix}{asked['prompt']}"
    prompt = prompt_from(where, asked | {k: v for k, v in row.items() if k in _SAMPLING})
    return replace(prompt, sampling={**prompt.sampling, **_limit(where, row, args)})


def _limit(where: str, row: Row, args: Namespace) -> dict[str, Any]:
    """The length of the answer by a column of the row; --output-len overrides it."""
    columns = [name for name in (*_FIXED_LENGTH_COLUMNS, _LIMIT_COLUMN) if row.get(name)]
    if args.output_len is not None or not columns:
        return {}
    try:
        limit = int(row[columns[0]])
    except (ValueError, TypeError):
        raise ConfigError(f"{where}: {columns[0]} must be an integer.") from None
    return {"max_tokens": limit} | ({} if columns[0] == _LIMIT_COLUMN else {"ignore_eos": True})


def _sharegpt(path: str, rows: list[Row], args: Namespace) -> MakePrompts:
    """First questions of conversations; an answer may be as long as the recorded one."""

    def prompts(tokenize: Tokenize | None) -> Iterator[PromptRecord]:
        shuffled = random.Random(args.seed or 0).sample(rows, len(rows))
        for row in shuffled:
            turns: Any = row.get("conversations") or row.get("conversation") or ()
            if len(turns) < 2:
                continue
            try:
                question, answer = str(turns[0]["value"]), str(turns[1]["value"])
            except (KeyError, TypeError, IndexError):
                raise ConfigError(
                    f'{path}: a turn must be {{"from": ..., "value": ...}}.'
                ) from None
            num_in = _count(question, tokenize)
            num_out = args.output_len or _count(answer, tokenize)
            short = min(num_in, num_out) < _SHAREGPT_LEAST
            if not short and num_in <= _SHAREGPT_MOST_IN and num_in + num_out <= _SHAREGPT_MOST:
                yield PromptRecord(text=question, sampling={"max_tokens": num_out})

    return prompts


def _sonnet(lines: list[str], args: Namespace) -> MakePrompts:
    """Lines of poems at random up to the length of a prompt, after a beginning that all share."""
    if not lines:
        raise ConfigError(f"{args.dataset} is empty.")
    most = {"max_tokens": args.output_len or _SONNET_OUTPUT}
    shared = _SONNET_PREFIX if args.prefix_len is None else args.prefix_len

    def prompts(tokenize: Tokenize | None) -> Iterator[PromptRecord]:
        rng = random.Random(args.seed or 0)
        per_line = _count("\n".join(lines), tokenize) / len(lines)
        left = (args.input_len or _SONNET_INPUT) - _count(_SONNET_TASK, tokenize) - shared
        first = [lines[i % len(lines)] for i in range(round(shared / per_line))]
        while True:
            drawn = rng.choices(lines, k=max(round(left / per_line), 1))
            yield PromptRecord(text=_SONNET_TASK + "\n".join(first + drawn), sampling=most)

    return prompts


def _count(text: str, tokenize: Tokenize | None) -> int:
    return len(tokenize(text) if tokenize else text.split())
