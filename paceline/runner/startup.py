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
from paceline.layers.linear import dense, packed_fp16, packed_fp16_works
from paceline.models.decoder import Decoder
from paceline.models.loading import DummyWeights, WeightFormats, load_decoder
from paceline.models.spec import ModelSpec, read_spec
from paceline.models.weights import open_weights
from paceline.runner.device_step import Device
from paceline.runner.runner import CpuRunner
from paceline.runner.sizing import num_pages, page_bytes
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
class Loaded:
    """A model in memory and where it came from."""

    files: ModelFiles
    spec: ModelSpec
    model: Decoder
    dtype_name: str


def build_runner(config: EngineConfig, progress: Progress) -> Runner:
    """Everything between `paceline serve` and the first step, for one device."""
    if config.device.device == "cuda":
        raise ConfigError("--device cuda is not supported yet; use --device cpu (or auto).")
    torch.set_grad_enabled(False)
    num_threads = config.device.cpu_threads or default_threads()
    torch.set_num_threads(num_threads)
    progress("locating the model", 0.0)
    files = locate(
        config.model.model,
        revision=config.model.revision,
        load_format=config.model.load_format,
    )
    spec = read_spec(files.config)
    max_model_len = _max_model_len(config, spec)
    target = _load(config, files, spec, max_model_len, progress)
    draft = _load_draft(config, spec, max_model_len, progress)
    slots, pages = _state(config, target, draft, max_model_len)
    drafter = _drafter(config.speculative, draft, pages)
    device = Device(
        model=target.model,
        layer_pages=_layers(pages, spec),
        drafter=drafter,
        slots=slots,
        pages=pages,
        rules=_rules(config.speculative),
        custom=_custom(config, spec),
    )
    info = _info(config, target, draft, device)
    progress("ready", 1.0)
    return CpuRunner(device, info, num_threads)


def default_threads() -> int:
    """Physical cores: a second hyper-thread adds contention, not bandwidth (bench/cpu_threads)."""
    return max(torch.get_num_threads(), 1)


def _max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    wanted = config.model.max_model_len
    if wanted is None:
        return spec.max_position
    if wanted > spec.max_position:
        raise ConfigError(
            f"max_model_len {wanted} is more than the {spec.max_position} positions that this "
            "model was made for; lower --max-model-len."
        )
    return wanted


def _load(
    config: EngineConfig,
    files: ModelFiles,
    spec: ModelSpec,
    max_model_len: int,
    progress: Progress,
) -> Loaded:
    formats, name = _formats(config, files)
    if config.model.load_format == "dummy":
        dummy = DummyWeights(spec, config.model.seed)
        model = load_decoder(spec, dummy, formats, max_model_len=max_model_len, progress=progress)
        return Loaded(files, spec, model, name)
    weights = open_weights(files, config.model.load_format)
    try:
        model = load_decoder(spec, weights, formats, max_model_len=max_model_len, progress=progress)
    finally:
        weights.close()
    return Loaded(files, spec, model, name)


def _formats(config: EngineConfig, files: ModelFiles) -> tuple[WeightFormats, str]:
    """fp32 as it is; everything narrower through packed fp16 weights where the CPU can."""
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    stored = str(files.config.get("dtype") or files.config.get("torch_dtype") or "float32")
    is_quantised = files.kind == "gguf"
    wanted = config.model.dtype
    if wanted == "auto":
        narrow = is_quantised or stored in ("bfloat16", "float16")
        round_to = None
    else:
        narrow = wanted != "float32"
        round_to = names[wanted] if narrow else None
    if narrow and packed_fp16_works():
        return (
            WeightFormats(packed_fp16, torch.float16, torch.float32, _CPU, round_to),
            "float16 (packed weights, float32 activations)",
        )
    if narrow:
        logger.warning("this CPU or torch build has no packed fp16 product; computing in float32")
    linear = dense(torch.float32, _CPU)
    return WeightFormats(linear, torch.float32, torch.float32, _CPU, round_to), "float32"


def _load_draft(
    config: EngineConfig, target: ModelSpec, max_model_len: int, progress: Progress
) -> Loaded | None:
    spec_config = config.speculative
    if spec_config is None or spec_config.method != "draft_model":
        return None
    assert spec_config.model is not None
    files = locate(
        spec_config.model, revision=spec_config.revision, load_format=config.model.load_format
    )
    spec = read_spec(files.config)
    if spec.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"the draft model {spec_config.model!r} has a vocabulary of {spec.vocab_size} tokens, "
            f"the target has {target.vocab_size}; a draft model needs the target's vocabulary."
        )
    if spec.max_position < max_model_len:
        raise ConfigError(
            f"the draft model was made for {spec.max_position} positions, fewer than max_model_len "
            f"{max_model_len}; lower --max-model-len to {spec.max_position}."
        )
    return _load(config, files, spec, max_model_len, progress)


def _state(
    config: EngineConfig, target: Loaded, draft: Loaded | None, max_model_len: int
) -> tuple[Slots, Pages]:
    spec_config = config.speculative
    num_slots = config.scheduler.max_num_seqs
    models = [target] if draft is None else [target, draft]
    itemsize = _KV_DTYPE.itemsize
    per_token = [m.spec.kv_bytes_per_token(itemsize) for m in models]
    count = num_pages(
        config.cache,
        page_bytes(config.cache.block_size, per_token),
        max_model_len=max_model_len,
        max_num_seqs=num_slots,
        gpu=None,
        cpu_free_bytes=_free_memory_bytes(),
    )
    pages = Pages(count, config.cache.block_size, num_slots, max_model_len, _CPU)
    keeps_probs = spec_config is not None and spec_config.draft_sample_method == "probabilistic"
    slots = Slots(
        num_slots,
        max_model_len,
        spec_config.num_speculative_tokens if spec_config else 0,
        target.spec.vocab_size,
        _CPU,
        draft_vocab_size=target.spec.vocab_size if keeps_probs and draft is not None else 0,
    )
    return slots, pages


def _drafter(config: SpeculativeConfig | None, draft: Loaded | None, pages: Pages) -> Drafter:
    if config is None:
        return NoDrafter()
    if draft is None:
        return NgramDrafter(
            config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max
        )
    return DraftModel(
        model=draft.model,
        layer_pages=_layers(pages, draft.spec),
        max_k=config.num_speculative_tokens,
        is_probabilistic=config.draft_sample_method == "probabilistic",
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


def _info(config: EngineConfig, target: Loaded, draft: Loaded | None, device: Device) -> RunnerInfo:
    pages, slots = device.pages, device.slots
    per_token = target.spec.kv_bytes_per_token(_KV_DTYPE.itemsize)
    if draft is not None:
        per_token += draft.spec.kv_bytes_per_token(_KV_DTYPE.itemsize)
    return RunnerInfo(
        num_pages=pages.num_pages,
        page_size=pages.page_size,
        num_slots=slots.num_slots,
        max_model_len=slots.max_model_len,
        vocab_size=target.spec.vocab_size,
        max_k=device.drafter.max_k,
        draft_lookahead=device.drafter.lookahead,
        model_name=target.files.name,
        device="cpu",
        dtype=target.dtype_name,
        weights_bytes=target.model.nbytes + (draft.model.nbytes if draft else 0),
        kv_cache_bytes=pages.num_pages * pages.page_size * per_token,
    )


def _free_memory_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
