"""From a configuration to a runner that is ready: locate, load, size, build. Runs once.

The same for every device: `runner/platform` lists what a device decides.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from paceline.config import EngineConfig
from paceline.drafters.base import Drafter
from paceline.errors import ConfigError
from paceline.kernels.step_rows import PacketLayout
from paceline.models.decoder import Decoder
from paceline.models.layout import add_storage, make_recurrent
from paceline.parallel.placement import ONLY_RANK, RankPlace
from paceline.runner.load_models import (
    Loader,
    Progress,
    draft_max_len,
    find_models,
    forced_rates,
    kv_window,
    make_drafter,
)
from paceline.runner.platform import Models, Platform
from paceline.runner.platform_cpu import CpuPlatform
from paceline.runner.ranks import cuda_device, open_ranks
from paceline.runner.runner import StepRunner
from paceline.runner.step import Device
from paceline.sampling.custom import CustomProcessors
from paceline.sampling.verify import Synthetic
from paceline.state.pages import Pages
from paceline.state.recurrent import LayerStorage, Recurrent
from paceline.state.slots import Slots
from paceline.state.step_buffers import Capacity, make_logprobs, make_ring, slot_tensors
from paceline.step import Runner, RunnerInfo


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
    if not is_gpu:
        return build_on(CpuPlatform(config, place), config, progress, place)
    from paceline.runner.platform_cuda import CudaPlatform

    return build_on(CudaPlatform(*cuda_device(config, place)), config, progress, place)


def build_on(
    platform: Platform, config: EngineConfig, progress: Progress, place: RankPlace = ONLY_RANK
) -> StepRunner:
    """On a device that is open."""
    asked_slots = config.scheduler.max_num_seqs
    config = replace(config, scheduler=config.scheduler.sized(is_gpu=platform.is_gpu))
    progress("locating the model", 0.0)
    found = find_models(config)
    ranks = open_ranks(config, place, [f.spec for f in found], platform.backend)
    specs = [f.local(ranks.of(i)) for i, f in enumerate(found)]
    models = Models(config, found, specs, ranks, asked_slots)
    max_model_len = ranks.smallest("length", platform.max_model_len(models))
    loader = Loader(
        config,
        lambda x: replace(platform.formats(models, x), has_fp8_pages=config.cache.is_fp8),
        progress,
        groups=ranks.groups,
        draft_groups=ranks.draft_groups,
    )
    model = loader.decoder(found[0], max_model_len)
    ranks.meet("target")
    progress("sizing the cache", 0.0)
    dtype, num_snapshots, taken = platform.kv_dtype(models), 0, 0
    share = models.share_state(max_model_len, dtype, platform.kv_budget(models))
    if share is not None:
        scheduler = replace(config.scheduler, max_num_seqs=share.num_slots)
        models = replace(models, config=replace(config, scheduler=scheduler))
        num_snapshots, taken = share.num_snapshots, share.taken
    slots = _slots(models, max_model_len, platform.device)
    fitting = models.num_pages(max_model_len, dtype, platform.kv_budget(models) - taken)
    count, page_size = ranks.smallest("pages", fitting), config.cache.block_size
    pages = Pages(count, page_size, slots.num_slots, max_model_len, platform.device)
    recurrent = make_recurrent(specs[0], slots, num_snapshots, dtype)
    layers = [
        add_storage(pages, spec, models.page_dtype(dtype), None if i else recurrent)
        for i, spec in enumerate(specs)
    ]
    head = loader.head(found[1], model, layers[1]) if len(found) > 1 else None
    progress("making room for steps", 0.0)
    drafter = make_drafter(config.speculative, head)
    layout = platform.packet_layout(models, drafter)
    parts = _device(models, (model, layers[0]), drafter, (slots, pages, recurrent), layout)
    execution = platform.execution(models, parts, layout)
    info = replace(
        _info(models, parts, platform),
        pays_for_missing_drafts=execution.source.has_shapes,
        max_late_drafter_rows=execution.source.max_late,
        max_row_appends=layout.max_appends // layout.max_rows if layout.max_rows else None,
    )
    names = config.model.logits_processors
    runner = StepRunner(
        parts,
        info,
        execution.source,
        execution.make_stream,
        custom=CustomProcessors(names, slots.vocab_size, slots.device) if names else None,
        lockstep=ranks.lockstep,
        captures=execution.captures,
        checks_syncs=config.device.check_syncs,
    )
    ranks.meet("draft")
    platform.prepare(runner, models, progress)
    progress("ready", 1.0)
    return runner


def _slots(models: Models, max_model_len: int, device: torch.device) -> Slots:
    speculative, vocab_size = models.config.speculative, models.found[0].spec.vocab_size
    keeps_probs = speculative is not None and speculative.draft_sample_method == "probabilistic"
    return Slots(
        models.num_slots,
        max_model_len,
        models.window_k,
        vocab_size,
        device,
        num_sampled=models.max_k,
        num_rates=len(forced_rates(speculative) or ()),
        draft_vocab_size=vocab_size if keeps_probs and len(models.found) > 1 else 0,
    )


def _device(
    models: Models,
    target: tuple[Decoder, list[LayerStorage]],
    drafter: Drafter,
    state: tuple[Slots, Pages, Recurrent | None],
    layout: PacketLayout,
) -> Device:
    slots, pages, recurrent = state
    capacity = Capacity(slots.num_slots, 0, slots.max_k)
    ring = make_ring(capacity, layout, slots.device)
    speculative = models.config.speculative
    rates = forced_rates(speculative)
    return Device(
        model=target[0],
        layer_pages=target[1],
        drafter=drafter,
        slots=slots,
        pages=pages,
        state=slot_tensors(slots, pages),
        ring=ring,
        logprobs=make_logprobs(capacity, models.config.model.max_logprobs, ring),
        synthetic=None if slots.rates_SK is None else Synthetic(slots.rates_SK, rates or ()),
        groups=models.ranks.groups,
        recurrent=recurrent,
        is_block=speculative is not None and speculative.rejection_sample_method == "block",
    )


def _methods(models: Models) -> tuple[str, ...]:
    """Which drafters are loaded: a guess from a name may have been corrected by the files."""
    speculative = models.config.speculative
    if speculative is None:
        return ()
    method = models.found[1].method if len(models.found) > 1 else speculative.method
    host = speculative.host_method
    return (method,) if host in (None, method) else (host, method)


def _info(models: Models, parts: Device, platform: Platform) -> RunnerInfo:
    """What the host is told: the same facts on every device."""
    slots, pages, drafter = parts.slots, parts.pages, parts.drafter
    dtype, is_fp8 = platform.kv_dtype(models), models.config.cache.is_fp8
    bytes_per_token = sum(models.token_bytes(dtype))
    files = models.found[0].files
    return RunnerInfo(
        num_pages=pages.num_pages,
        page_size=pages.page_size,
        num_slots=slots.num_slots,
        max_model_len=slots.max_model_len,
        vocab_size=slots.vocab_size,
        max_k=drafter.max_k,
        draft_lookahead=drafter.lookahead,
        max_host_drafts=models.config.max_host_drafts,
        draft_methods=_methods(models),
        draft_max_len=draft_max_len(models.config, models.found, slots.max_model_len),
        draft_reads_features=drafter.reads_features,
        kv_window=kv_window(models.found),
        is_recurrent=parts.recurrent is not None,
        num_snapshots=parts.recurrent.num_snapshots if parts.recurrent else 0,
        max_num_batched_tokens=models.config.scheduler.sizes[1],
        model_name=files.name,
        kv_cache_dtype="fp8_e4m3" if is_fp8 else str(dtype).removeprefix("torch."),
        kv_cache_bytes=pages.num_pages * pages.page_size * bytes_per_token,
        device=platform.name,
        dtype=platform.formats(models, models.found[0]).name,
        weights_bytes=parts.model.nbytes,
    )
