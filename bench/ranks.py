"""The cost of lock step between replicas: a single request, an idle cluster, a wake.

usage: python bench/ranks.py [--replicas 4] [--pairs 5] [--wakes 200] [--json FILE]

A tiny Mixtral with random weights, experts spread over all ranks, one thread per rank. Measures
  - the time between tokens of a single request against one per replica (alternating);
  - the time of the first agreement after all ranks slept;
  - the share of a core that a rank uses while all sleep.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.resting import busy_shares
from paceline import LLM, SamplingParams
from paceline.commands.report import machine

CONFIG = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}
PROMPT = list(range(3, 19))
AWAKE_S = 0.02  # all ranks sleep after a pause longer than this


def itl_ms(llm: LLM, num_requests: int, tokens: int) -> float:
    """Milliseconds between two tokens of a request while this number of requests runs."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [*PROMPT, 20 + i]} for i in range(num_requests)]
    gaps = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        first, last = output.metrics.first_token_time, output.metrics.finished_time
        assert first is not None
        assert last is not None
        gaps.append((last - first) / (tokens - 1) * 1000)
    return statistics.median(gaps)


def lone_against_all(llm: LLM, replicas: int, pairs: int, tokens: int) -> dict[str, Any]:
    itl_ms(llm, replicas, 8)
    found = [(itl_ms(llm, 1, tokens), itl_ms(llm, replicas, tokens)) for _ in range(pairs)]
    ratios = [lone / every for lone, every in found]
    return {
        "lone_itl_ms": round(statistics.median(x for x, _ in found), 3),
        "all_itl_ms": round(statistics.median(x for _, x in found), 3),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(x, 3) for x in ratios],
    }


def wakes(llm: LLM, count: int) -> dict[str, Any]:
    """The first agreement after a sleep: from sending the wake to the end of the agreement."""
    client = llm._client
    client.start_trace()
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    for i in range(count):
        time.sleep(2 * AWAKE_S)
        llm.generate([{"prompt_token_ids": [*PROMPT, i % 400]}], params, use_tqdm=False)
    spans = sorted(client.take_trace(), key=lambda span: span.start_s)
    woken, end_s = [], 0.0
    for span in spans:
        if span.lane == "agree" and span.start_s - end_s > AWAKE_S:
            woken.append((span.end_s - span.start_s) * 1000)
        end_s = max(end_s, span.end_s)
    woken.sort()
    return {
        "count": len(woken),
        "median_ms": round(statistics.median(woken), 3),
        "p99_ms": round(woken[int(0.99 * (len(woken) - 1))], 3),
    }


def idle_share(llm: LLM, seconds: float) -> list[float]:
    """CPU use as a share of a core, by rank."""
    time.sleep(0.5)
    return [round(share, 4) for share in busy_shares(llm._client.engine_pids, seconds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--wakes", type=int, default=200)
    parser.add_argument("--idle-seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        with LLM(
            folder,
            load_format="dummy",
            dtype="float32",
            skip_tokenizer_init=True,
            data_parallel_size=args.replicas,
            enable_expert_parallel=True,
            enable_prefix_caching=False,
            cpu_threads=1,
            max_num_seqs=4,
        ) as llm:
            result = {
                "machine": machine(),
                "replicas": args.replicas,
                "itl": lone_against_all(llm, args.replicas, args.pairs, args.tokens),
                "wake": wakes(llm, args.wakes),
                "idle_share_of_a_core": idle_share(llm, args.idle_seconds),
            }
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
