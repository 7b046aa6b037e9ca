"""The tables of docs/reference/supported.md, by asking the code: each family's reader reads a small
config.json, and each head's reader judges it as a target."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from paceline.checkpoint.gguf_config import ARCHITECTURES
from paceline.errors import CheckpointError, ConfigError
from paceline.kernels.panels.reference import BLOCK_BYTES
from paceline.kernels.table import operations
from paceline.models.blocks.latent_attention import LatentSpec
from paceline.models.config_json import Config
from paceline.models.families import FAMILIES, read_spec
from paceline.models.heads.base import HeadSpec, check_draft_model
from paceline.models.heads.registry import HEADS
from paceline.models.spec import ModelSpec
from paceline.parallel.collectives import Group
from paceline.parallel.contract import Contract
from paceline.parallel.groups import Groups
from paceline.speculation import HostMethod, Method, SpeculativeConfig

GPU_RECORD = Path(__file__).parents[1] / "tests" / "gpu_last_run.json"
LAYERS: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
EXPERTS = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_shared_experts": 1,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
# A head's config.json beside LAYERS.
HEAD_KEYS: dict[str, dict[str, Any]] = {
    "mtp": {"num_nextn_predict_layers": 1},
    "eagle": {},
    "eagle3": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}},
    "peagle": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, "ptd_token_id": 3},
    "dflash": {"dflash_config": {"mask_token_id": 3, "block_size": 8, "target_layer_ids": [1]}},
    "pard": {"architectures": ["LlamaForCausalLM"], "pard_token": 3, "spd_type": "pard"},
}
HEAD_KEYS["dspark"] = {
    "architectures": ["DSparkDraftModel"],
    "dflash_config": HEAD_KEYS["dflash"]["dflash_config"] | {"markov_rank": 4},
}
# Tests of each kind of model in the record of the last run on a GPU.
GPU_TESTS = {"dense": "engine", "experts": "expert", "latent": "latent", "recurrent": "hybrid"}
INTRO = """# What is supported

Written by `make docs` from the code; do not edit. A family's reader reads a small `config.json`,
and every drafter's reader judges the result as its target.

Any row of the first table combines with any row of the others, except where a cell says no. What
does not fit is refused at start-up, with the reason.

## Families

"Kernels on the CPU": the operations that have no vector kernel (numba) there and run in torch,
which is slower. "Run on a GPU": the kind of model is in the last `make test-gpu`
([record](../../tests/gpu_last_run.json): {date}, one {gpu}).
"""
FORMATS = """
Weights are read from safetensors and `pytorch_model.bin`, of one file or of shards, in fp32, bf16
or fp16, and in fp8 as DeepSeek, compressed-tensors and modelopt write it; `--quantization fp8`
rounds wider weights while they are loaded ([fp8](../howto/quantization.md); not yet run on a GPU).
A GGUF is one file; its tensors may have any type that the `gguf` package can dequantise. On the CPU
{packed} stay packed. `--load-format dummy` makes random weights for any family. Other quantised
formats (AWQ, GPTQ, int8, NVFP4, MXFP4) are refused.

## Families and drafters

Which method of `--speculative-config` drafts for which target. `draft_model` also asks whether the
family itself can be a draft model. `mtp` needs a checkpoint that has an MTP layer.
"""
LAYOUTS = """
## Layouts

"tp": `--tensor-parallel-size`, if the heads, inner sizes and vocabulary divide. "dp":
`--data-parallel-size`, also over [several machines](../howto/machines.md). "ep":
`--enable-expert-parallel`. All combine with each other and with every drafter; a draft is cut like
the target or whole on every rank. Tensor parallel over machines, and pipeline parallel, are
refused. Layouts of several ranks were run on CPUs and on one GPU that the ranks share; never on
several GPUs ([what was tested](../howto/parallel.md)).
"""
DRAFTERS = """
## Drafters

Greedy output is the same with every drafter. [Drafters](../howto/speculation.md) has the options,
and what a seed gives with each.
"""


def supported() -> str:
    record = json.loads(GPU_RECORD.read_text(encoding="utf-8"))
    specs = {name: spec_of(name) for name in FAMILIES}
    lines = [INTRO.format(date=record["date"], gpu=record["gpu"])]
    lines += _table(_family_rows(specs, record["files"]))
    lines += [FORMATS.format(packed=_names(BLOCK_BYTES))]
    methods = [m for m in get_args(Method) if m not in get_args(HostMethod)]
    head = ["target", *_code(get_args(HostMethod)), *_code(methods), "is a draft model"]
    rows = [head]
    for name, spec in specs.items():
        can_draft = _yes(_is_accepted(check_draft_model, "x", spec, spec))
        looked_up = ("yes" for _ in get_args(HostMethod))
        rows.append([f"`{name}`", *looked_up, *(_drafts(m, spec) for m in methods), can_draft])
    lines += _table(rows)
    lines += [LAYOUTS, *_table(_layout_rows(specs)), DRAFTERS, *_table(_drafter_rows())]
    return "\n".join(lines) + "\n"


def config_of(architecture: str) -> dict[str, Any]:
    """The smallest config.json that a reader takes."""
    config = {**LAYERS, "architectures": [architecture], **EXPERTS}
    if "Deepseek" in architecture or "Glm4" in architecture:
        config |= LATENT
    if "Qwen3_5" in architecture and "Moe" not in architecture:
        del config["num_local_experts"]
    return config


def spec_of(architecture: str) -> ModelSpec:
    return read_spec(config_of(architecture))


def kind_of(spec: ModelSpec) -> str:
    if spec.recurrent is not None:
        return "recurrent"
    if isinstance(spec.attention, LatentSpec):
        return "latent"
    return "experts" if spec.has_experts else "dense"


def _family_rows(specs: Mapping[str, ModelSpec], tested: Config) -> Iterable[list[str]]:
    yield ["family", "made of", "GGUF", "kernels on the CPU", "run on a GPU"]
    from_gguf = {hf_class: name for name, (hf_class, _) in ARCHITECTURES.items()}
    for name, spec in specs.items():
        parts = ["latent attention" if kind_of(spec) == "latent" else "grouped attention"]
        parts += ["gated delta net"] * (spec.recurrent is not None)
        parts += ["experts" if spec.has_experts else "dense MLP"]
        slow = _without_numba(spec)
        gpu = f"tests/gpu/test_{GPU_TESTS[kind_of(spec)]}_gpu.py" in tested
        gguf = f"`{from_gguf[name]}`" if name in from_gguf else "no"
        cpu = f"torch: {_names(slow)}" if slow else "numba"
        yield [f"`{name}`", ", ".join(parts), gguf, cpu, "yes" if gpu else "not yet"]


def _without_numba(spec: ModelSpec) -> list[str]:
    """Operations of a model's blocks that have no vector kernel."""
    needed = ["mla_attention" if isinstance(spec.attention, LatentSpec) else "paged_attention"]
    needed += ["delta_rule"] * (spec.recurrent is not None)
    needed += ["apply_experts"] * spec.has_experts
    return [name for name in needed if "numba" not in operations()[name].files]


def _drafts(method: str, spec: ModelSpec) -> str:
    """Whether a method takes this target."""
    if method == "draft_model":
        return _yes(_is_accepted(check_draft_model, "x", spec_of("LlamaForCausalLM"), spec))
    return _yes(_is_accepted(read_head, method, spec))


def read_head(method: str, target: ModelSpec) -> HeadSpec:
    values: dict[str, Any] = {"method": method, "num_speculative_tokens": 2}
    if not HEADS[method].is_in_target:
        values["model"] = "x"
    options = SpeculativeConfig.from_mapping(values)
    return HEADS[method].read("x", {**LAYERS, **HEAD_KEYS[method]}, target, options)


def _layout_rows(specs: Mapping[str, ModelSpec]) -> Iterable[list[str]]:
    yield ["family", "tp", "dp", "ep"]
    two = Groups(tp=Group("tp", range(2), 0, Contract(), None))
    for name, spec in specs.items():
        yield [f"`{name}`", _yes(_is_accepted(spec.local, two)), "yes", _yes(spec.has_experts)]


def _drafter_rows() -> Iterable[list[str]]:
    yield ["method", "drafts with", "passes of a step", "works on"]
    llama = spec_of("LlamaForCausalLM")
    for method in get_args(Method):
        head = HEADS.get(method)
        if head is None:
            source = "another model" if method == "draft_model" else "text of the requests"
        else:
            in_target = "a layer of the target's checkpoint"
            source = in_target if head.is_in_target else f"a checkpoint ({head.title})"
        is_block = head is not None and hasattr(read_head(method, llama), "layout")
        passes = "one" if is_block else "one per draft"
        if method in get_args(HostMethod):
            passes = "none"
        where = "the host" if method == "suffix" else "CPU"
        if method != "suffix":
            where += ", CUDA (not run yet)" if is_block else ", CUDA"
        yield [f"`{method}`", source, passes, where]


def _is_accepted(judge: Any, *arguments: Any) -> bool:
    try:
        judge(*arguments)
    except (CheckpointError, ConfigError):
        return False
    return True


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _code(names: Iterable[str]) -> list[str]:
    return [f"`{name}`" for name in names]


def _names(names: Iterable[str]) -> str:
    return ", ".join(_code(names))


def _table(rows: Iterable[list[str]]) -> list[str]:
    head, *body = rows
    return [_row(head), "|" + "---|" * len(head), *map(_row, body)]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
