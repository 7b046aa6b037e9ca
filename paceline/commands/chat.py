"""`paceline chat`: a conversation in the terminal, with tokens and speed of each answer."""

from __future__ import annotations

import contextlib
import sys
from argparse import Namespace

from paceline.commands.arguments import engine_config, sampling_keywords
from paceline.commands.prompts import PromptRecord
from paceline.commands.session import Answer, Session, open_session
from paceline.errors import InvalidRequest
from paceline.request import SamplingParams

HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


def run(args: Namespace) -> int:
    config = engine_config(args)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() its line editing and history
    with open_session(config) as session:
        params = session.params({"max_tokens": None, **sampling_keywords(args)})
        print(f"{session.client.info.model_name or 'model'} is ready. {HELP}", file=sys.stderr)
        Conversation(session, params, args.system_prompt).run()
    return 0


class Conversation:
    """The messages so far, and the loop that reads and answers lines."""

    def __init__(self, session: Session, params: SamplingParams, system_prompt: str | None) -> None:
        self._session = session
        self._params = params
        self._opening = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self.messages: list[dict[str, str]] = list(self._opening)

    def run(self) -> None:
        while (line := self._read()) is not None:
            command = line.strip()
            if not command:
                continue
            if command in ("/exit", "/quit"):
                return
            if command == "/reset":
                self.messages = list(self._opening)
                print("(a new conversation)", file=sys.stderr)
            elif command.startswith("/"):
                print(f"There is no {command.split()[0]}. {HELP}", file=sys.stderr)
            else:
                self._ask(line)

    def _read(self) -> str | None:
        """The next line; None at the end of input. Ctrl-C clears the line."""
        while True:
            try:
                return input("> " if sys.stdin.isatty() else "")
            except EOFError:
                print(file=sys.stderr)  # so that the shell's prompt begins a new line
                return None
            except KeyboardInterrupt:
                print(f"\n{HELP}", file=sys.stderr)

    def _ask(self, line: str) -> None:
        asked = [*self.messages, {"role": "user", "content": line}]
        try:
            answer = self._session.submit(PromptRecord(messages=asked), self._params)
        except InvalidRequest as error:
            print(f"{error} /reset starts again.", file=sys.stderr)
            return
        try:
            for text in self._session.stream(answer):
                print(text, end="", flush=True)
        except KeyboardInterrupt:
            self._session.abort(answer)
            print("".join(answer.unread), end="")
        print(flush=True)
        if answer.generation.error is not None:
            raise answer.generation.error
        self.messages = [*asked, {"role": "assistant", "content": answer.outputs[0].text}]
        print(f"[{cost(answer)}]", file=sys.stderr)


def cost(answer: Answer) -> str:
    """`42 tokens, 35.1 tok/s, first after 0.12 s, 12 of 20 drafts accepted`."""
    metrics = answer.metrics
    parts = [f"{answer.num_tokens} tokens"]
    if answer.arrivals:
        first, last = answer.arrivals[0], answer.arrivals[-1]
        later = answer.num_tokens - first[1]
        if later and last[0] > first[0]:
            parts.append(f"{later / (last[0] - first[0]):.1f} tok/s")
        parts.append(f"first after {first[0] - metrics.arrival_time:.2f} s")
    if metrics.num_draft_tokens:
        accepted = f"{metrics.num_accepted_tokens} of {metrics.num_draft_tokens}"
        parts.append(f"{accepted} drafts accepted")
    reason = answer.outputs[0].finish_reason
    if reason in (None, "length"):
        parts.append("stopped" if reason is None else "cut at the length limit")
    return ", ".join(parts)
