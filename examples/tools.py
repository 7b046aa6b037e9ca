"""Let the model call a function: `make serve` in one terminal, then `python examples/tools.py`.

Needs `pip install openai`, and on the server `'.[server,tools]'` (`make serve` has it). Another
server: `python examples/tools.py http://host:8000/v1 KEY`. The built-in model is too small to
decide well, so the call is required here; with a larger model use `tool_choice="auto"`.
"""

import json
import sys
from typing import Any

from openai import OpenAI

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "book_table",
            "description": "Book a table in a restaurant.",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "enum": ["Luigi", "Chez Anne"]},
                    "guests": {"type": "integer"},
                },
                "required": ["place", "guests"],
                "additionalProperties": False,
            },
        },
    }
]


def book_table(place: str, guests: int) -> str:
    return f"A table for {guests} at {place} is booked."


url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=url, api_key=sys.argv[2] if len(sys.argv) > 2 else "none")
model = client.models.list().data[0].id
messages: list[Any] = [{"role": "user", "content": "Book a table for three at Luigi, please."}]
reply = client.chat.completions.create(
    model=model,
    messages=messages,
    tools=TOOLS,
    tool_choice="required",
    parallel_tool_calls=False,
    max_tokens=100,
    temperature=0,
)
message = reply.choices[0].message
messages.append(message)
for call in message.tool_calls or []:
    assert call.type == "function"
    print("call:  ", call.function.name, call.function.arguments)
    result = book_table(**json.loads(call.function.arguments))
    print("result:", result)
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
answer = client.chat.completions.create(
    model=model, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=48, temperature=0
)
print("answer:", answer.choices[0].message.content)
