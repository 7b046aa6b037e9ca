"""Generate text without a server: `python examples/offline.py`."""

from paceline import LLM, SamplingParams

prompts = ["The capital of France is", "Copy this: alpha beta gamma alpha beta"]

with LLM(speculative_config={"method": "ngram", "num_speculative_tokens": 5}) as llm:
    params = SamplingParams(temperature=0, max_tokens=24)
    for output in llm.generate(prompts, params):
        metrics = output.metrics
        print(repr(output.prompt), "->", repr(output.outputs[0].text))
        print(f"  {metrics.num_accepted_tokens} of {metrics.num_draft_tokens} drafts accepted")
