"""`paceline chat`: a conversation in the terminal, with tokens and speed of each answer."""

from __future__ import annotations

import sys
from argparse import Namespace
from contextlib import ExitStack

from paceline.commands.arguments import engine_config, sampling_keywords
from paceline.commands.prompts import PromptRecord
from paceline.commands.session import Answer, Session, open_session
from paceline.commands.terminal import input_off, open_view, sigterm_exits, styled
from paceline.errors import InvalidRequest
from paceline.request import SamplingParams

try:
    import readline  # gives input() its line editing and history
except ImportError:
    _HAS_READLINE = False
else:
    _HAS_READLINE = True
    readline.parse_and_bind("set enable-bracketed-paste on")

HINT = "/help lists the commands; Ctrl-D leaves."
HELP = """/help     this text
/reset    forget the conversation
/exit     leave, as Ctrl-D does
Ctrl-C stops an answer, or clears the line.
A line that ends with \\ goes on with the next. Lines between two lines of
\"\"\" are one message, and so are lines that are pasted together."""
_BLOCK = '"""'


def run(args: Namespace) -> int:
    config = engine_config(args)
    with sigterm_exits(), ExitStack() as stack:
        with input_off():
            session = stack.enter_context(open_session(config))
        params = session.params({"max_tokens": None, **sampling_keywords(args)})
        say(f"{session.client.info.model_name or 'model'} is ready. {HINT}")
        Conversation(session, params, args.system_prompt).run()
    return 0


def say(text: str) -> None:
    """A line of the program itself: on standard error, dim on a terminal, written at once."""
    print(styled(text, "dim", sys.stderr), file=sys.stderr, flush=True)


class Conversation:
    """The messages so far, and the loop that reads and answers lines."""

    def __init__(self, session: Session, params: SamplingParams, system_prompt: str | None) -> None:
        self._session = session
        self._params = params
        self._opening = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self.messages: list[dict[str, str]] = list(self._opening)

    def run(self) -> None:
        while (message := self._read()) is not None:
            command = message.strip() if "\n" not in message else ""
            if not message.strip():
                continue
            if command in ("/exit", "/quit"):
                return
            if command == "/help":
                say(HELP)
            elif command == "/reset":
                self.messages = list(self._opening)
                say("(a new conversation)")
            elif command.startswith("/"):
                say(f"There is no {command.split()[0]}. {HINT}")
            else:
                self._ask(message)

    def _read(self) -> str | None:
        """The next message; None at the end of input. Ctrl-C forgets what was typed of it."""
        while True:
            lines: list[str] = []
            try:
                while True:
                    lines.append(self._line(is_first=not lines))
                    is_block = lines[0].strip() == _BLOCK
                    if is_block and len(lines) > 1 and lines[-1].strip() == _BLOCK:
                        return "\n".join(lines[1:-1])
                    if not is_block and not lines[-1].endswith("\\"):
                        return "\n".join([*(line[:-1] for line in lines[:-1]), lines[-1]])
            except EOFError:
                print(file=sys.stderr)  # so that the shell's prompt begins a new line
                begun = lines[1:] if lines[:1] == [_BLOCK] else lines
                return "\n".join(begun) if lines else None
            except KeyboardInterrupt:
                print(file=sys.stderr)
                say(HINT)

    def _line(self, *, is_first: bool) -> str:
        if not sys.stdin.isatty():
            return input()
        prompt = styled("> " if is_first else ". ", "green", sys.stdout, in_prompt=_HAS_READLINE)
        return input(prompt)

    def _ask(self, line: str) -> None:
        asked = [*self.messages, {"role": "user", "content": line}]
        try:
            answer = self._session.submit(PromptRecord(messages=asked), self._params)
        except InvalidRequest as error:
            say(f"{error} /reset starts again.")
            return
        view = open_view()
        with input_off():
            try:
                for text in self._session.stream(answer):
                    view.write(text)
            except KeyboardInterrupt:
                self._session.abort(answer)
                view.write("".join(answer.unread))
            finally:
                view.end()
        if answer.generation.error is not None:
            raise answer.generation.error
        self.messages = [*asked, {"role": "assistant", "content": answer.outputs[0].text}]
        say(f"[{cost(answer)}]")


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
