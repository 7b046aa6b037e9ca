"""Stream an answer from a running server: tokens of one step arrive together.

Needs `pip install openai`. Another server: `python examples/streaming.py http://host:8000/v1 KEY`.
"""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=url, api_key=sys.argv[2] if len(sys.argv) > 2 else "none")
stream = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "Count from one to ten."}],
    max_tokens=48,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
num_chunks = 0
for chunk in stream:
    for choice in chunk.choices:
        if choice.delta.content:
            num_chunks += 1
            print(choice.delta.content, end="", flush=True)
    if chunk.usage is not None:
        print(f"\n{chunk.usage.completion_tokens} tokens in {num_chunks} chunks")
