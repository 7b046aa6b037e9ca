"""Ask a running server: `make serve` in one terminal, `python examples/chat.py` in another.

Needs `pip install openai`. Another server: `python examples/chat.py http://host:8000/v1 KEY`.
"""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=url, api_key=sys.argv[2] if len(sys.argv) > 2 else "none")
reply = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    max_tokens=32,
    temperature=0,
)
print(reply.choices[0].message.content)
assert reply.usage is not None
print(f"{reply.usage.completion_tokens} tokens, finish reason {reply.choices[0].finish_reason}")
