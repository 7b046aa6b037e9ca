"""Short ways to run a tiny model under one configuration or another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline import LLM, RequestOutput, SamplingParams
from tests.e2e.ladder import BLOCKS, Workshop

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": False}


def draft_model(workshop: Workshop, k: int = 4, **more: Any) -> dict[str, Any]:
    return {
        "method": "draft_model",
        "model": workshop.draft_folder("llama"),
        "num_speculative_tokens": k,
        "adaptive": False,
        **more,
    }


def eagle(workshop: Workshop, k: int = 4, **more: Any) -> dict[str, Any]:
    return head(workshop, "eagle", k, **more)


def eagle3(workshop: Workshop, k: int = 4, **more: Any) -> dict[str, Any]:
    return head(workshop, "eagle3", k, **more)


def head(workshop: Workshop, drafter: str, k: int = 4, **more: Any) -> dict[str, Any]:
    method = BLOCKS.get(drafter, drafter)
    spec = {"method": method, "num_speculative_tokens": k, "adaptive": False, **more}
    return spec if drafter == "mtp" else spec | {"model": workshop.head_folder("llama", drafter)}


def folder_for(workshop: Workshop, spec: dict[str, Any] | None) -> str:
    """The tiny llama; with its MTP layer where that is to draft."""
    needs_mtp = spec is not None and spec["method"] == "mtp"
    return workshop.head_folder("llama", "mtp") if needs_mtp else workshop.target_folder("llama")


def tiny_llm(workshop: Workshop, spec: dict[str, Any] | None = None, **options: Any) -> LLM:
    """The tiny llama in this process, in fp32, one thread."""
    defaults: dict[str, Any] = {
        "model": folder_for(workshop, spec),
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
        "cpu_threads": 1,
        "engine_in_process": True,
    }
    return workshop.open_llm(speculative_config=spec, **{**defaults, **options})


def run(
    workshop: Workshop,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    spec: dict[str, Any] | None = None,
    **options: Any,
) -> list[RequestOutput]:
    with tiny_llm(workshop, spec, **options) as llm:
        asked = [{"prompt_token_ids": list(p)} for p in prompts]
        return llm.generate(asked, params, use_tqdm=False)


def tokens(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    return [[list(o.token_ids) for o in output.outputs] for output in outputs]
