"""From a configuration to a runner that is ready: locate, load, size, build. Runs once."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.checkpoint.source import ModelFiles, locate
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.drafters.autoregressive import DraftModel
from paceline.drafters.base import Drafter, NoDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.errors import CheckpointError, ConfigError
from paceline.kernels.dispatch import has_numba
from paceline.layers.linear import (
    block_panels,
    exact_linear,
    narrow_panels,
    packed_fp16,
    packed_fp16_works,
)
from paceline.models.decoder import Decoder
from paceline.models.loading import DummyWeights, WeightFormats, load_decoder
from paceline.models.spec import ModelSpec, read_spec
from paceline.models.weights import open_weights
from paceline.runner.device_step import Device
from paceline.runner.runner import CpuRunner
from paceline.runner.sizing import kv_budget, num_pages, page_bytes
from paceline.sampling.custom import CustomProcessors
from paceline.sampling.verify import AcceptRules, synthetic_rates
from paceline.state.pages import LayerPages, Pages
from paceline.state.slots import Slots
from paceline.step import Runner, RunnerInfo

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
_KV_DTYPE = torch.float32
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Found:
    """A model on this disk, before its weights are read."""

    files: ModelFiles
    spec: ModelSpec

    @property
    def kv_bytes_per_token(self) -> int:
        return self.spec.kv_bytes_per_token(_KV_DTYPE.itemsize)


def build_runner(config: EngineConfig, progress: Progress) -> Runner:
    """Everything between `paceline serve` and the first step, for one device."""
    if config.device.device == "cuda":
        raise ConfigError("--device cuda is not supported yet; use --device cpu (or auto).")
    torch.set_grad_enabled(False)
    num_threads = config.device.cpu_threads or default_threads()
    torch.set_num_threads(num_threads)
    progress("locating the model", 0.0)
    target = _find(config, config.model.model, config.model.revision)
    draft = _find_draft(config, target.spec)
    # Sizes first: what cannot fit is refused before gigabytes are read.
    found = [target] if draft is None else [target, draft]
    max_model_len = _max_model_len(config, found)
    slots, pages = _state(config, found, max_model_len)
    device = Device(
        model=_load(config, target, max_model_len, progress),
        layer_pages=_layers(pages, target.spec),
        drafter=_drafter(config, draft, pages, max_model_len, progress),
        slots=slots,
        pages=pages,
        rules=_rules(config.speculative),
        custom=_custom(config, target.spec),
    )
    progress("ready", 1.0)
    return CpuRunner(device, _info(config, found, device), num_threads)


def default_threads() -> int:
    """Every core that torch sees: measured in bench/cpu_peers."""
    return max(torch.get_num_threads(), 1)


def _find(config: EngineConfig, model: str, revision: str | None) -> Found:
    files = locate(model, revision=revision, load_format=config.model.load_format)
    return Found(files, read_spec(files.config))


def _find_draft(config: EngineConfig, target: ModelSpec) -> Found | None:
    spec_config = config.speculative
    if spec_config is None or spec_config.method != "draft_model":
        return None
    assert spec_config.model is not None
    draft = _find(config, spec_config.model, spec_config.revision)
    if draft.spec.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"the draft model {spec_config.model!r} has a vocabulary of {draft.spec.vocab_size} "
            f"tokens, the target has {target.vocab_size}; a draft model needs the target's "
            "vocabulary."
        )
    return draft


def _max_model_len(config: EngineConfig, found: list[Found]) -> int:
    """What was asked for; else what the models were made for, or the KV cache holds if less."""
    longest = min(f.spec.max_position for f in found)
    wanted = config.model.max_model_len
    if wanted is not None:
        if wanted > longest:
            raise ConfigError(
                f"max_model_len {wanted} is more than the {longest} positions that "
                f"{'these models were' if len(found) > 1 else 'this model was'} made for; lower "
                "--max-model-len."
            )
        return wanted
    capacity = kv_budget(config.cache, None, _free_memory_bytes()) // sum(
        f.kv_bytes_per_token for f in found
    )
    fitting = max(capacity // config.cache.block_size - 1, 1) * config.cache.block_size
    if fitting >= longest or config.cache.num_gpu_blocks_override is not None:
        return longest
    logger.warning(
        "max_model_len is %d, what the KV cache holds; the model was made for %d: raise "
        "--kv-cache-memory-bytes for longer sequences",
        fitting,
        longest,
    )
    return fitting


def _load(config: EngineConfig, found: Found, max_model_len: int, progress: Progress) -> Decoder:
    formats = _formats(config, found.files)
    spec = found.spec
    if config.model.load_format == "dummy":
        dummy = DummyWeights(spec, config.model.seed)
        return load_decoder(spec, dummy, formats, max_model_len=max_model_len, progress=progress)
    weights = open_weights(found.files, config.model.load_format)
    try:
        return load_decoder(spec, weights, formats, max_model_len=max_model_len, progress=progress)
    finally:
        weights.close()


def _formats(config: EngineConfig, files: ModelFiles) -> WeightFormats:
    """fp32 as it is; everything narrower as narrow as the checkpoint has it, where the CPU can."""
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    stored = str(files.config.get("dtype") or files.config.get("torch_dtype") or "float32")
    wanted = config.model.dtype
    round_to = None if wanted in ("auto", "float32") else names[wanted]
    if wanted == "auto":
        narrow = files.kind == "gguf" or stored in ("bfloat16", "float16")
    else:
        narrow = wanted != "float32"
    # The table is read a row at a time, so it costs memory and no bandwidth: never rounded.
    # Dequantised values need more bits than half precision has.
    embedding = torch.float32 if files.kind == "gguf" else names.get(stored, torch.float32)
    if narrow and has_numba(_CPU):
        return WeightFormats(
            narrow_panels,
            embedding,
            torch.float32,
            _CPU,
            round_to,
            "the checkpoint's weights, float32 activations",
            blocks=block_panels,
        )
    if narrow and packed_fp16_works():
        return WeightFormats(
            packed_fp16,
            embedding,
            torch.float32,
            _CPU,
            round_to,
            "float16 weights, float32 activations",
        )
    if narrow:
        logger.warning("this CPU or torch build has no packed fp16 product; computing in float32")
    linear = exact_linear(_CPU)
    return WeightFormats(linear, torch.float32, torch.float32, _CPU, round_to, "float32")


def _state(config: EngineConfig, found: list[Found], max_model_len: int) -> tuple[Slots, Pages]:
    spec_config = config.speculative
    num_slots = config.scheduler.max_num_seqs
    count = num_pages(
        config.cache,
        page_bytes(config.cache.block_size, [f.kv_bytes_per_token for f in found]),
        max_model_len=max_model_len,
        max_num_seqs=num_slots,
        gpu=None,
        cpu_free_bytes=_free_memory_bytes(),
    )
    pages = Pages(count, config.cache.block_size, num_slots, max_model_len, _CPU)
    keeps_probs = spec_config is not None and spec_config.draft_sample_method == "probabilistic"
    vocab_size = found[0].spec.vocab_size
    slots = Slots(
        num_slots,
        max_model_len,
        spec_config.num_speculative_tokens if spec_config else 0,
        vocab_size,
        _CPU,
        draft_vocab_size=vocab_size if keeps_probs and len(found) > 1 else 0,
    )
    return slots, pages


def _drafter(
    config: EngineConfig,
    draft: Found | None,
    pages: Pages,
    max_model_len: int,
    progress: Progress,
) -> Drafter:
    spec_config = config.speculative
    if spec_config is None:
        return NoDrafter()
    k = spec_config.num_speculative_tokens
    if draft is None:
        return NgramDrafter(k, spec_config.prompt_lookup_min, spec_config.prompt_lookup_max)
    return DraftModel(
        model=_load(config, draft, max_model_len, progress),
        layer_pages=_layers(pages, draft.spec),
        max_k=k,
        is_probabilistic=spec_config.draft_sample_method == "probabilistic",
    )


def _layers(pages: Pages, spec: ModelSpec) -> list[LayerPages]:
    return pages.add_layers(spec.num_layers, spec.num_kv_heads, spec.head_size, _KV_DTYPE)


def _rules(config: SpeculativeConfig | None) -> AcceptRules:
    if config is None or config.rejection_sample_method == "standard":
        return AcceptRules()
    if config.synthetic_acceptance_rates is not None:
        return AcceptRules.synthetic(config.synthetic_acceptance_rates, _CPU)
    assert config.synthetic_acceptance_length is not None
    k = config.num_speculative_tokens
    return AcceptRules.synthetic(synthetic_rates(config.synthetic_acceptance_length, k), _CPU)


def _custom(config: EngineConfig, spec: ModelSpec) -> CustomProcessors | None:
    names = config.model.logits_processors
    return CustomProcessors(names, spec.vocab_size, _CPU) if names else None


def _info(config: EngineConfig, found: list[Found], device: Device) -> RunnerInfo:
    pages, slots = device.pages, device.slots
    per_token = sum(f.kv_bytes_per_token for f in found)
    return RunnerInfo(
        num_pages=pages.num_pages,
        page_size=pages.page_size,
        num_slots=slots.num_slots,
        max_model_len=slots.max_model_len,
        vocab_size=found[0].spec.vocab_size,
        max_k=device.drafter.max_k,
        draft_lookahead=device.drafter.lookahead,
        model_name=found[0].files.name,
        device="cpu",
        dtype=_formats(config, found[0].files).name,
        weights_bytes=device.model.nbytes,
        kv_cache_bytes=pages.num_pages * pages.page_size * per_token,
    )


def _free_memory_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
