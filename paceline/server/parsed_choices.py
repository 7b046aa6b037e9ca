"""The parsers of a reply's choices, for every API that shows reasoning or tool calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from paceline.server.job import ChoiceDelta, Job
from paceline.server.replies import Usage
from paceline.text.output_parts import OutputParser, OutputParts


class ParsedChoices:
    """One parser per choice, made when its first output comes."""

    def __init__(self, make_parser: Callable[[], OutputParser]) -> None:
        self._parsers: defaultdict[int, OutputParser] = defaultdict(make_parser)

    def parts(self, delta: ChoiceDelta) -> OutputParts:
        """The new output of a choice, sorted. Call it once for each delta."""
        parser = self._parsers[delta.index]
        parts = parser.feed(delta.text, delta.token_ids)
        if delta.finish_reason is not None:
            parts.add(parser.finish())
        return parts

    def finish_reason(self, delta: ChoiceDelta) -> str | None:
        """`tool_calls` in place of `stop` if the choice has made a call."""
        if delta.finish_reason == "stop" and self._parsers[delta.index].has_tool_calls:
            return "tool_calls"
        return delta.finish_reason

    def usage(self, job: Job) -> Usage:
        used = job.usage()
        reasoning = sum(parser.num_reasoning_tokens for parser in self._parsers.values())
        used.completion_tokens_details.reasoning_tokens = reasoning
        return used
