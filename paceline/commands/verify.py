"""`paceline verify`: proves what Paceline promises, on the user's model, drafter and prompts.

Starts engines one after another, so that they never share the memory.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from paceline.commands import http_stream
from paceline.commands.arguments import engine_config, engine_keywords, flag
from paceline.commands.prompts import PromptRecord, read_prompts
from paceline.commands.verify_checks import CHECKS, Check, Proof, Result, Status
from paceline.commands.verify_report import Line, Report, print_line, write_report
from paceline.commands.verify_target import ServerTarget, Target, open_engine
from paceline.config import EngineConfig
from paceline.errors import ConfigError, InvalidRequest, PacelineError
from paceline.observe.progress import StatusLine

# Repeats, so that lookups find drafts too.
_PROMPTS = (
    "one two three four five six seven one two three four five six seven one two three",
    "The cat sat on the mat. The dog sat on the mat. The bird sat on the",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday,",
    "Write a short story about a lighthouse keeper and a lighthouse.",
    "Q: What is the capital of France?\nA: Paris\nQ: What is the capital of Italy?\nA:",
    '{"name": "Ada", "age": 36}\n{"name": "Alan", "age": 41}\n{"name": "Grace", "age":',
    "To be, or not to be, that is the question: To be, or not to be,",
)
_OTHER_ENGINE = "needs a second engine: run `paceline verify MODEL` with the server's flags"


def run(args: Namespace) -> int:
    for name in ("max_tokens", "concurrency", "draws"):
        if (value := getattr(args, name)) < 1:
            raise ConfigError(f"{flag(name)} is {value}; it must be at least 1.")
    folder = _folder(args.output)
    prompts = [PromptRecord(text=text) for text in _PROMPTS]
    if args.prompts is not None:
        prompts = read_prompts(args.prompts)
        if own := sorted({name for prompt in prompts for name in prompt.sampling}):
            raise ConfigError(
                f"{args.prompts} sets {', '.join(own)}; each check sets its own sampling "
                "parameters, so remove them."
            )
    report = Report()
    status = StatusLine()
    for line in _verify(args, prompts, report, status):
        status.clear()
        print_line(line)
        report.lines.append(line)
    code = _verdict(report, partial=args.partial)
    if folder is not None:
        write_report(report, folder)
        print(f"Report: {folder / 'verify.html'}, {folder / 'verify.json'}")
    return code


def _verify(
    args: Namespace, prompts: list[PromptRecord], report: Report, status: StatusLine
) -> Iterator[Line]:
    """Each check in turn. Those of the first engine come first; it is closed before the next."""
    config: EngineConfig | None = None
    with ExitStack() as stack:
        if args.url is not None:
            if given := sorted(set(engine_keywords(args)) - {"speculative_config", "dtype"}):
                flags = ", ".join(map(flag, given))
                raise ConfigError(f"--url is a running server; give {flags} when you start it.")
            dtype = args.dtype or "bfloat16"  # the most tolerant: the server does not say
            endpoint = http_stream.Endpoint.parse(args.url, args.api_key)
            target: Target = ServerTarget(endpoint, dtype)
        else:
            config = engine_config(args)
            target = stack.enter_context(open_engine(config))
        proof = _proof(args, target, prompts)
        about = report.about = target.about
        for check in CHECKS:
            if check.change is None:
                status.show(f"{check.name}: {check.shows}")
                yield Line(check, _guarded(check, proof))
    for check in CHECKS:
        if check.change is None:
            continue
        if config is None:
            yield Line(check, Result(Status.NOT_CHECKED, _OTHER_ENGINE))
            continue
        found = check.change(config, about)
        if isinstance(found, EngineConfig) and not proof.has_record:
            found = Result(Status.NOT_CHECKED, "the first engine gave no answers to compare with")
        status.show(f"{check.name}: {check.shows}")
        if isinstance(found, EngineConfig):
            found = _on_second_engine(check, proof, found)
        yield Line(check, found)


def _proof(args: Namespace, target: Target, prompts: list[PromptRecord]) -> Proof:
    """Raises for prompts that cannot be asked."""
    try:
        encoded = [target.encode(prompt) for prompt in prompts]
    except http_stream.RequestFailed as error:
        raise ConfigError(
            f"The server does not encode the prompts (/tokenize): {error}. Give --prompts a JSON "
            "Lines file with prompt_token_ids."
        ) from None
    limit = target.about.max_model_len
    for number, tokens in enumerate(encoded, start=1):
        if limit is not None and len(tokens) + args.max_tokens >= limit:
            raise ConfigError(
                f"Prompt {number} has {len(tokens)} tokens; with --max-tokens {args.max_tokens} "
                f"that must be less than max_model_len {limit}. Shorten one of them."
            )
    return Proof(target, encoded, args.max_tokens, args.concurrency, args.draws, args.max_bubble)


def _on_second_engine(check: Check, proof: Proof, config: EngineConfig) -> Result:
    with ExitStack() as stack:
        try:
            target = stack.enter_context(open_engine(config))
        except PacelineError as error:
            return Result(Status.NOT_CHECKED, f"its engine did not start: {error}")
        first, proof.target = proof.target, target
        try:
            return _guarded(check, proof)
        finally:
            proof.target = first


def _guarded(check: Check, proof: Proof) -> Result:
    """What cannot be asked is not checked; an engine or server that fails does not hold."""
    try:
        return check.run(proof)
    except InvalidRequest as error:
        return Result(Status.NOT_CHECKED, str(error))
    except PacelineError as error:
        return Result(Status.FAILS, str(error))
    except http_stream.NotOffered as error:
        return Result(Status.NOT_CHECKED, str(error))
    except http_stream.RequestFailed as error:
        return Result(Status.FAILS, str(error))


def _verdict(report: Report, *, partial: bool) -> int:
    counts = {s: sum(line.result.status is s for line in report.lines) for s in Status}
    report.holds = not counts[Status.FAILS] and (partial or not counts[Status.NOT_CHECKED])
    report.summary = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
    print(f"\n{report.summary}")
    if counts[Status.NOT_CHECKED] and not counts[Status.FAILS] and not partial:
        print("paceline: --partial accepts what was not checked", file=sys.stderr)
    return 0 if report.holds else 1


def _folder(path: str | None) -> Path | None:
    """Made before the model is loaded, so that a wrong path fails at once."""
    if path is None:
        return None
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {path}: {error.strerror}.") from None
    return Path(path)
