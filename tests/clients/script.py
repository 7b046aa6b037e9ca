"""What the scripted model answers: the user's message contains the answers of all turns.

A client can send any script as a prompt, so a test has the question, the calls and the answer in
one place. `script` writes such a prompt, `answer` reads it back from the prompt of the model.
"""

from __future__ import annotations

import json
import re
from typing import Any

OPEN, NEXT, CLOSE = "[[script]]", "[[next]]", "[[end]]"
RESULT = "[[result]]"  # in an answer: the text of the last tool result
OTHERWISE = "Something else."  # to a prompt without a script, or when the script has ended
TOOL_HEAD = "<|im_start|>tool\n"
ANSWER_HEAD = "<|im_start|>assistant\n"
# ChatML with Hermes' tools and reasoning, in the shape of the Qwen models.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n<tools>\n"
    "{% for t in tools %}{{ t | tojson }}\n{% endfor %}</tools><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def script(*answers: str) -> str:
    """A prompt for which the model gives these answers, one per turn."""
    return f"{OPEN}{NEXT.join(answers)}{CLOSE}"


def call(name: str, /, **arguments: Any) -> str:
    """A tool call as the model writes it."""
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def answer(prompt: str) -> str:
    """The model's text after a prompt."""
    before, opened, after = prompt.rpartition(OPEN)
    written, closed, later = after.partition(CLOSE)
    if not opened or not closed:
        return OTHERWISE
    turn = later.count(ANSWER_HEAD) - 1
    answers = written.split(NEXT)
    if turn >= len(answers):
        return OTHERWISE
    chosen = answers[turn]
    # Agents send the user's words in requests for a title too. They have no such tool.
    tools = before.partition("<tools>")[2].partition("</tools>")[0]
    called = re.findall(r'<tool_call>\n\{"name": ("[^"]*")', chosen)
    if any(f'"name": {name}' not in tools for name in called):
        return OTHERWISE
    result = later.rpartition(TOOL_HEAD)[2].partition("<|im_end|>")[0]
    return chosen.replace(RESULT, result)
