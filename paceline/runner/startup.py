"""From a configuration to a runner that is ready: locate, load, size, build. Runs once.

Here for the CPU; runner/startup_cuda does the same for a GPU.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from paceline.checkpoint.source import ModelFiles
from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.kernels.table import has_numba
from paceline.layers.linear import (
    block_panels,
    exact_linear,
    narrow_panels,
    packed_fp16,
    packed_fp16_works,
)
from paceline.models.layout import add_pages
from paceline.models.reader import WeightFormats
from paceline.models.spec import ModelSpec
from paceline.observe.memory import host_memory
from paceline.parallel.placement import ONLY_RANK, RankPlace
from paceline.runner.assemble import assemble, custom_processors
from paceline.runner.compact_rows import CompactSource
from paceline.runner.finding import (
    Found,
    Loader,
    Progress,
    find_models,
    make_drafter,
    wanted_length,
)
from paceline.runner.info import runner_info, token_bytes
from paceline.runner.ranks import Ranks, cuda_device, open_ranks, steps_together
from paceline.runner.runner import StepRunner
from paceline.runner.sizing import kv_budget, num_pages, page_bytes
from paceline.runner.streams import ThreadStream
from paceline.runner.warm_up import warm_up
from paceline.state.pages import LayerPages, Pages
from paceline.state.slots import Slots
from paceline.step import Runner

logger = logging.getLogger(__name__)

_KV_DTYPE = torch.float32
_CPU = torch.device("cpu")


def build_runner(config: EngineConfig, progress: Progress, place: RankPlace = ONLY_RANK) -> Runner:
    """Everything between `paceline serve` and the first step, for one device."""
    torch.set_grad_enabled(False)
    progress("opening the device", 0.0)
    wanted = config.device.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda: torch finds no usable NVIDIA GPU here; use --device cpu, or install a "
            "torch build with CUDA."
        )
    is_gpu = wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available())
    config = replace(config, scheduler=config.scheduler.sized(is_gpu=is_gpu))
    if is_gpu:
        from paceline.runner.startup_cuda import build_fixed_runner

        return build_fixed_runner(config, progress, place, *cuda_device(config, place))
    return _build_cpu_runner(config, progress, place)


def _build_cpu_runner(config: EngineConfig, progress: Progress, place: RankPlace) -> Runner:
    num_threads = config.device.cpu_threads or default_threads(place.layout.num_ranks)
    torch.set_num_threads(num_threads)
    progress("locating the model", 0.0)
    found = find_models(config)
    ranks = open_ranks(config, place, [f.spec for f in found], "gloo")
    # Sizes first: what cannot fit is refused before gigabytes are read.
    specs = [f.local(ranks.of(i)) for i, f in enumerate(found)]
    free_bytes = host_memory().available // place.layout.num_ranks
    max_model_len = ranks.smallest("length", _max_model_len(config, found, specs, free_bytes))
    slots, pages = _state(config, specs, max_model_len, ranks, free_bytes)
    loader = Loader(
        config,
        lambda files: _formats(config, files),
        progress,
        groups=ranks.groups,
        draft_groups=ranks.draft_groups,
    )
    model = loader.decoder(found[0], max_model_len)
    layers = [_layers(pages, spec) for spec in specs]
    ranks.meet("target")
    head = loader.head(found[1], model, layers[1]) if len(found) > 1 else None
    drafter = make_drafter(config.speculative, head)
    device = assemble(config, (model, layers[0]), drafter, (slots, pages), ranks.groups)
    info = runner_info(
        config,
        found,
        (slots, pages),
        drafter,
        sum(token_bytes(specs, _KV_DTYPE.itemsize)),
        device="cpu",
        dtype=_formats(config, found[0].files).name,
        weights_bytes=model.nbytes,
    )
    runner = StepRunner(
        device,
        info,
        CompactSource(device),
        lambda _: ThreadStream(num_threads),
        custom=custom_processors(config, slots),
        lockstep=ranks.lockstep,
    )
    ranks.meet("draft")
    progress("warming up", 0.0)
    warm_up(runner, is_joint=steps_together(place.layout, [f.spec for f in found]))
    progress("ready", 1.0)
    return runner


def default_threads(num_ranks: int = 1) -> int:
    """Every core that torch sees (measured in bench/cpu_peers); ranks share them."""
    return max(torch.get_num_threads() // num_ranks, 1)


def _max_model_len(
    config: EngineConfig, found: list[Found], specs: list[ModelSpec], free_bytes: int
) -> int:
    """What was asked for; else what the models were made for, or the KV cache holds if less."""
    longest, is_asked = wanted_length(config, found)
    if is_asked or config.cache.num_gpu_blocks_override is not None:
        return longest
    budget = kv_budget(config.cache, None, free_bytes)
    capacity = budget // sum(token_bytes(specs, _KV_DTYPE.itemsize))
    fitting = max(capacity // config.cache.block_size - 1, 1) * config.cache.block_size
    if fitting >= longest:
        return longest
    logger.warning(
        "max_model_len is %d, what the KV cache holds; the model was made for %d: raise "
        "--kv-cache-memory-bytes for longer sequences",
        fitting,
        longest,
    )
    return fitting


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


def _state(
    config: EngineConfig,
    specs: list[ModelSpec],
    max_model_len: int,
    ranks: Ranks,
    free_bytes: int,
) -> tuple[Slots, Pages]:
    spec_config = config.speculative
    num_slots, _ = config.scheduler.sizes
    count = num_pages(
        config.cache,
        page_bytes(config.cache.block_size, token_bytes(specs, _KV_DTYPE.itemsize)),
        max_model_len=max_model_len,
        max_num_seqs=num_slots,
        gpu=None,
        cpu_free_bytes=free_bytes,
    )
    count = ranks.smallest("pages", count)
    pages = Pages(count, config.cache.block_size, num_slots, max_model_len, _CPU)
    keeps_probs = spec_config is not None and spec_config.draft_sample_method == "probabilistic"
    vocab_size = specs[0].vocab_size
    slots = Slots(
        num_slots,
        max_model_len,
        spec_config.num_speculative_tokens if spec_config else 0,
        vocab_size,
        _CPU,
        draft_vocab_size=vocab_size if keeps_probs and len(specs) > 1 else 0,
    )
    return slots, pages


def _layers(pages: Pages, spec: ModelSpec) -> list[LayerPages]:
    return add_pages(pages, spec, _KV_DTYPE)
