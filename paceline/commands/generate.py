"""`paceline generate`: answers one prompt or a file of them, as JSONL in their order."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, TextIO

from paceline.commands import loading
from paceline.commands.arguments import engine_config, sampling_keywords
from paceline.commands.prompts import PromptRecord, read_prompts
from paceline.commands.session import Answer, Session, open_session
from paceline.errors import ConfigError, EngineDead, InvalidRequest
from paceline.observe.progress import ProgressLine

DEFAULT_MAX_TOKENS = 256
# Open prompts per slot of the engine: enough that no slot waits for a prompt.
_WINDOW_PER_SLOT = 4


def run(args: Namespace) -> int:
    config = engine_config(args)
    loading.check_model(config)
    if args.prompt is not None and args.input is not None:
        raise ConfigError("--prompt and --input cannot be used together.")
    if args.prompt is not None:
        prompts = [PromptRecord(text=args.prompt)]
    else:
        if args.input in (None, "-") and sys.stdin.isatty():
            print("One prompt per line; Ctrl-D when done.", file=sys.stderr)
        prompts = read_prompts(args.input)
    if args.chat:
        prompts = [prompt.as_message() for prompt in prompts]
    given = {"max_tokens": DEFAULT_MAX_TOKENS, **sampling_keywords(args)}
    with _output(args.output) as stream, open_session(config) as session:
        return answer_all(session, prompts, given, stream)


def answer_all(
    session: Session, prompts: list[PromptRecord], given: dict[str, Any], stream: TextIO
) -> int:
    """Keep the engine busy, and write answers in order as soon as they are complete."""
    # On a terminal the answers show the progress.
    progress = ProgressLine(len(prompts), "Answered prompts", is_shown=not stream.isatty())
    window = _WINDOW_PER_SLOT * session.client.num_slots
    waiting = iter(prompts)
    answers: deque[Answer | InvalidRequest] = deque()
    num_failed = 0
    for index, prompt in enumerate(prompts):
        room = window - len(answers)
        answers.extend(_submit(session, next_one, given) for next_one in islice(waiting, room))
        answer = answers.popleft()
        if isinstance(answer, Answer):
            session.wait([answer])
            result = _result(answer)
            progress.update(1, answer.num_tokens)
        else:
            result = {"error": str(answer)}
            progress.update(1)
        num_failed += "error" in result
        record = {"index": index, **_question(prompt), **result}
        stream.write(json.dumps(record, ensure_ascii=False) + "\n")
        stream.flush()
    progress.close()
    if num_failed:
        print(f"paceline: {num_failed} of {len(prompts)} prompts failed", file=sys.stderr)
    return 1 if num_failed else 0


def _submit(
    session: Session, prompt: PromptRecord, given: dict[str, Any]
) -> Answer | InvalidRequest:
    """The error of an invalid prompt becomes its answer; other prompts are not affected."""
    try:
        return session.submit(prompt, session.params(given, prompt.sampling))
    except InvalidRequest as error:
        return error


def _question(prompt: PromptRecord) -> dict[str, Any]:
    asked = {
        "id": prompt.id,
        "prompt": prompt.text,
        "messages": prompt.messages,
        "prompt_token_ids": prompt.token_ids,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _result(answer: Answer) -> dict[str, Any]:
    error = answer.generation.error
    if isinstance(error, EngineDead):
        raise error  # no other prompt can be answered either
    if error is not None:
        return {"error": str(error)}
    metrics = answer.metrics
    outputs = [
        {
            "text": output.text,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        for output in answer.outputs
    ]
    usage = {
        "prompt_tokens": len(answer.generation.prompt_token_ids),
        "completion_tokens": answer.num_tokens,
        "cached_tokens": metrics.num_cached_tokens,
        "draft_tokens": metrics.num_draft_tokens,
        "accepted_tokens": metrics.num_accepted_tokens,
    }
    return {"outputs": outputs, "usage": usage}


@contextmanager
def _output(path: str | None) -> Iterator[TextIO]:
    """Opened before the model is loaded, so that a wrong path fails at once."""
    if path in (None, "-"):
        yield sys.stdout
        return
    assert path is not None
    try:
        stream = open(path, "w", encoding="utf-8")  # noqa: SIM115 - closed below
    except OSError as error:
        raise ConfigError(f"--output {path}: {error.strerror}.") from None
    with stream:
        yield stream
