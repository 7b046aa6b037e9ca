"""Two replicas of the built-in model behind one LLM object: `python examples/several_ranks.py`.

On a machine with GPUs leave out `device`: rank r takes GPU r.
"""

from paceline import LLM, SamplingParams

prompts = [f"{number} times two is" for number in range(1, 9)]

with LLM(data_parallel_size=2, device="cpu", max_num_seqs=4) as llm:
    params = SamplingParams(temperature=0, max_tokens=8)
    for output in llm.generate(prompts, params):
        print(repr(output.prompt), "->", repr(output.outputs[0].text))
