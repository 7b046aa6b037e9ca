"""Measures how many drafts each way of choosing and accepting them gets through.

The target is the default model. The draft is the same model with noise added to its weights, so
that it agrees part of the time: only acceptance is measured, not speed. Run on a CPU.

`python -m bench.acceptance` takes contexts from the target's sampled answers, drafts several paths
after each, and computes the expected number of accepted drafts of each path from the models'
distributions: the same paths for both ways of rejection sampling, so that their difference is
known well after few contexts. `--engine` counts accepted drafts in whole runs of the engine.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline import LLM, SamplingParams
from paceline.checkpoint.convert import convert_gguf
from paceline.checkpoint.default_model import fetch_default_model
from paceline.kernels.rng import reference as rng

DATA = Path(__file__).parent / "data" / "chat_40.jsonl"
# draft_sample_method, rejection_sample_method
METHODS = (
    ("greedy", "standard"),
    ("coupled", "standard"),
    ("probabilistic", "standard"),
    ("probabilistic", "block"),
)

# Name of a row, which paths it is about, and by which rule.
LABELS = (
    ("greedy", "greedy", "onehot"),
    ("coupled", "coupled", "equal"),
    ("probabilistic, standard", "probabilistic", "standard"),
    ("probabilistic, block", "probabilistic", "block"),
)


def write_draft(folder: Path, noise: float) -> None:
    """The default model with normal noise of `noise` times each matrix's deviation."""
    convert_gguf(fetch_default_model(), folder, "bfloat16")
    generator = torch.Generator().manual_seed(0)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if tensor.ndim == 2 and "embed" not in name:
                error = torch.randn(tensor.shape, generator=generator)
                moved = tensor.float() + error * (noise * tensor.float().std())
                tensors[name] = moved.to(tensor.dtype)
        save_file(tensors, path, {"format": "pt"})


def softmax_rows(logits_RV: Tensor, temperature_R: Tensor) -> Tensor:
    return (logits_RV / temperature_R[:, None]).softmax(-1)


@torch.no_grad()
def walk(model: Any, context: list[int], rows: int, k: int, choose: Any) -> tuple[Tensor, Tensor]:
    """[R, K] tokens that `choose` takes one by one, and [R, K, V] logits that it saw."""
    out = model(torch.tensor([context]), use_cache=True)
    cache, logits_RV = out.past_key_values, out.logits[:, -1].repeat(rows, 1)
    cache.batch_repeat_interleave(rows)
    tokens, seen = [], []
    for j in range(k):
        seen.append(logits_RV)
        tokens.append(choose(logits_RV, j))
        if j + 1 < k:
            out = model(tokens[-1][:, None], past_key_values=cache, use_cache=True)
            logits_RV = out.logits[:, -1]
    return torch.stack(tokens, 1), torch.stack(seen, 1)


def of_context(
    target: Any, draft: Any, context: list[int], temperatures: list[float], args: argparse.Namespace
) -> dict[tuple[float, int, str], float]:
    """Expected accepted drafts by temperature, K and method, after one context."""
    paths, most = args.paths, max(args.k)
    kinds = ["greedy"] + ["coupled"] * paths + ["probabilistic"] * paths
    temperature_R = torch.tensor([t for t in temperatures for _ in kinds])
    kind_R = kinds * len(temperatures)
    rows = torch.arange(len(kind_R), dtype=torch.int32)
    seed_R2 = torch.stack((rows, rows * 0), 1)

    @cache
    def noise(j: int) -> Tensor:
        position_R = torch.full_like(rows, len(context) + j)
        return rng.exponential(seed_R2, position_R, rng.SAMPLE, target.config.vocab_size).log()

    is_kind = {kind: torch.tensor([k == kind for k in kind_R]) for kind in set(kinds)}

    def choose(logits_RV: Tensor, j: int) -> Tensor:
        coupled_R = (logits_RV / temperature_R[:, None] - noise(j)).argmax(-1)
        own_R = softmax_rows(logits_RV, temperature_R).multinomial(1)[:, 0]
        drawn_R = torch.where(is_kind["coupled"], coupled_R, own_R)
        return torch.where(is_kind["greedy"], logits_RV.argmax(-1), drawn_R)

    draft_RK, q_logits_RKV = walk(draft, context, len(kind_R), most, choose)
    forced_RK, p_logits_RKV = walk(target, context, len(kind_R), most, lambda _, j: draft_RK[:, j])
    assert torch.equal(forced_RK, draft_RK)
    standard_R, reach_R, equal_R = (torch.ones(len(kind_R)) for _ in range(3))
    sums: dict[tuple[float, int, str], float] = {}
    total = {name: torch.zeros(len(kind_R)) for name in ("onehot", "equal", "standard", "block")}
    onehot_R = torch.ones(len(kind_R))
    for j in range(most):
        at = draft_RK[:, j : j + 1]
        p_RV = softmax_rows(p_logits_RKV[:, j], temperature_R)
        p_R = p_RV.gather(1, at)[:, 0]
        q_R = softmax_rows(q_logits_RKV[:, j], temperature_R).gather(1, at)[:, 0]
        own_R = (p_logits_RKV[:, j] / temperature_R[:, None] - noise(j)).argmax(-1)
        onehot_R = onehot_R * p_R
        equal_R = equal_R * (own_R == at[:, 0])
        standard_R = standard_R * (p_R / q_R).clamp(max=1.0)
        reach_R = (reach_R * p_R / q_R).clamp(max=1.0)
        values = (onehot_R, equal_R, standard_R, reach_R)
        for name, value_R in zip(total, values, strict=True):
            total[name] += value_R
        if j + 1 in args.k:
            for temperature, (label, kind, name) in product(temperatures, LABELS):
                is_row = is_kind[kind] & (temperature_R == torch.tensor(temperature))
                sums[temperature, j + 1, label] = float(total[name][is_row].mean())
    return sums


def expected(draft_folder: Path, folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Means over contexts, with the deviation of each mean."""
    from transformers import AutoModelForCausalLM

    contexts = answers(args)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    target_folder = folder / "target"
    convert_gguf(fetch_default_model(), target_folder, "bfloat16")
    target, draft = (
        AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32)
        for f in (target_folder, draft_folder)
    )
    torch.manual_seed(0)
    found, begin_s = [], time.monotonic()
    for i, context in enumerate(contexts):
        found.append(of_context(target, draft, context, args.temperature, args))
        print(f"{i + 1} of {len(contexts)} contexts", flush=True)
        if args.seconds and time.monotonic() - begin_s > args.seconds:
            break
    rows = []
    for key in found[0]:
        value_C = torch.tensor([one[key] for one in found])
        base_C = torch.tensor([one[*key[:2], "probabilistic, standard"] for one in found])
        rows.append(
            {
                **dict(zip(("temperature", "k", "method"), key, strict=True)),
                "contexts": len(found),
                "accepted": round(float(value_C.mean()), 3),
                "deviation": round(float(value_C.std()) / len(found) ** 0.5, 3),
                "over_standard": round(float(value_C.mean() / base_C.mean()), 3),
                "over_standard_deviation": round(
                    float((value_C - base_C).std() / base_C.mean()) / len(found) ** 0.5, 3
                ),
            }
        )
    return rows


def answers(args: argparse.Namespace) -> list[list[int]]:
    """Prompts of DATA with the beginnings of the target's answers, at temperature 1."""
    lines = DATA.read_text(encoding="utf-8").splitlines()[: args.prompts]
    chats = [json.loads(line)["messages"] for line in lines]
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=6 + 5 * (i % 6), ignore_eos=True)
        for i in range(len(chats))
    ]
    with LLM(max_num_seqs=len(chats), max_model_len=1024) as llm:
        outputs = llm.chat(chats, params, use_tqdm=False)
    return [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]


def measure(spec: dict[str, Any], temperature: float, args: argparse.Namespace) -> dict[str, float]:
    lines = DATA.read_text(encoding="utf-8").splitlines()[: args.prompts]
    chats = [json.loads(line)["messages"] for line in lines]
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=args.tokens, ignore_eos=True)
        for i in range(len(chats))
    ]
    with LLM(speculative_config=spec, max_num_seqs=len(chats), max_model_len=1024) as llm:
        outputs = llm.chat(chats, params, use_tqdm=False)
        stats = llm.get_metrics()
    drafted = sum(o.metrics.num_draft_tokens for o in outputs)
    accepted = sum(o.metrics.num_accepted_tokens for o in outputs)
    emitted = sum(len(o.outputs[0].token_ids) - 1 for o in outputs)
    steps = sum(o.metrics.num_steps - 1 for o in outputs)
    first = stats.accepted_per_position[0] / stats.num_drafts if stats.num_drafts else 0.0
    return {
        "accepted": accepted / max(drafted, 1),
        "first": first,
        "tokens_per_step": emitted / max(steps, 1),
        "steps": steps,
    }


def engine_rows(draft: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for temperature, k, (drawn, rejection) in product(args.temperature, args.k, METHODS):
        spec = {
            "method": "draft_model",
            "model": str(draft),
            "num_speculative_tokens": k,
            "adaptive": False,
            "draft_sample_method": drawn,
            "rejection_sample_method": rejection,
        }
        row = {"temperature": temperature, "k": k, "draft": drawn, "rejection": rejection}
        found.append(row | measure(spec, temperature, args))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", action="store_true", help="count in runs of the engine")
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--seconds", type=float, default=0, help="start no context after these")
    parser.add_argument("--paths", type=int, default=8, help="sampled paths of each context")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--k", type=int, nargs="+", default=[3, 7])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.7, 1.0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / "draft"
        write_draft(draft, args.noise)
        found = engine_rows(draft, args) if args.engine else expected(draft, Path(folder), args)
    for row in found:
        print(json.dumps(row))
    if args.out is not None:
        settings = {name: str(value) for name, value in vars(args).items()}
        args.out.write_text(json.dumps({"settings": settings, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
