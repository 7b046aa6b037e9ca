"""From a configuration to a runner of fixed-shape steps: load, measure, size, capture. Runs once.

The device is a GPU; in tests it may be the CPU, with the kernels' references and no graphs.
"""

from __future__ import annotations

import logging

import torch

from paceline.checkpoint.source import ModelFiles
from paceline.config import EngineConfig
from paceline.drafters.base import Drafter
from paceline.kernels.gpu.device import open_compiler
from paceline.kernels.step_rows import PacketLayout
from paceline.layers.linear import cuda_linear, dense
from paceline.models.layout import add_pages
from paceline.models.reader import WeightFormats
from paceline.models.spec import ModelSpec
from paceline.parallel.groups import Backend
from paceline.parallel.placement import ONLY_RANK, RankPlace
from paceline.runner.assemble import assemble, custom_processors
from paceline.runner.captures import Captures
from paceline.runner.finding import (
    Found,
    Loader,
    Progress,
    find_models,
    make_drafter,
    wanted_length,
)
from paceline.runner.graphs import GraphKey, Graphs
from paceline.runner.info import runner_info, token_bytes
from paceline.runner.padded_rows import PaddedSource
from paceline.runner.ranks import Ranks, open_ranks
from paceline.runner.runner import StepRunner
from paceline.runner.shapes import EAGER_TOKENS, Buckets
from paceline.runner.sizing import MemoryReading, StepSizes, num_pages, page_bytes, step_bytes
from paceline.runner.step import Device, step_a, step_b
from paceline.runner.streams import DirectStream
from paceline.sampling.verify import scratch_bytes
from paceline.state.pages import Pages
from paceline.state.slots import Slots
from paceline.state.step_buffers import (
    Capacity,
    StepBuffers,
)
from paceline.step import Runner, RunnerInfo

logger = logging.getLogger(__name__)

_GPU = torch.device("cuda", 0)
# Pages that a row may take in advance: it asks for them less often, and packets stay short.
_AHEAD = 3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_fixed_runner(
    config: EngineConfig,
    progress: Progress,
    place: RankPlace = ONLY_RANK,
    device: torch.device = _GPU,
    backend: Backend = "gloo",
) -> Runner:
    """Everything between `paceline serve` and the first step, for one GPU."""
    if device.type == "cuda":
        _open(device)
    progress("locating the model", 0.0)
    found = find_models(config)
    ranks = open_ranks(config, place, [f.spec for f in found], backend)
    specs = [f.local(ranks.of(i)) for i, f in enumerate(found)]
    max_model_len, _ = wanted_length(config, found)
    dtype = compute_dtype(config, found[0].files)
    loader = Loader(
        config,
        lambda files: formats(dtype, device),
        progress,
        groups=ranks.groups,
        draft_groups=ranks.draft_groups,
    )
    model = loader.decoder(found[0], max_model_len)
    progress("sizing the cache", 0.0)
    slots = _slots(config, found, max_model_len, device)
    capacity = _capacity(config, slots)
    weight_bytes = found[0].spec.num_parameters * dtype.itemsize  # the same on every rank
    buckets = Buckets.of(capacity.rows, config.scheduler.sizes[1], capacity.k, weight_bytes)
    steps = step_bytes([_sizes(spec, capacity, buckets, dtype) for spec in specs])
    count = _num_pages(config, specs, steps, max_model_len, dtype, device, ranks)
    pages = Pages(count, config.cache.block_size, slots.num_slots, max_model_len, device)
    layers = [add_pages(pages, spec, dtype) for spec in specs]
    head = loader.head(found[1], model, layers[1]) if len(found) > 1 else None
    progress("making room for steps", 0.0)
    drafter = make_drafter(config.speculative, head)
    row_appends = _max_row_appends(capacity.k, drafter, pages.page_size)
    layout = PacketLayout(capacity.rows, capacity.rows * row_appends)
    parts = assemble(config, (model, layers[0]), drafter, (slots, pages), ranks.groups, layout)
    source = PaddedSource(parts, StepBuffers(capacity, device), layout, buckets)

    def run(key: GraphKey) -> None:
        step_b(parts, step_a(parts, source.of_shape(key.shape)), key.mode)

    uses_graphs = _uses_graphs(config, ranks, device, backend)
    runner = StepRunner(
        parts,
        _info(config, found, specs, parts, dtype, row_appends),
        source,
        DirectStream,
        custom=custom_processors(config, slots),
        lockstep=ranks.lockstep,
        captures=Captures(
            run,
            source.writer.write_empty,
            buckets,
            Graphs(run, device) if uses_graphs else None,
            compiles=device.type == "cuda",
        ),
    )
    ranks.meet("draft")
    runner.prepare(progress)
    progress("ready", 1.0)
    return runner


def _open(device: torch.device) -> None:
    open_compiler()
    torch.cuda.set_device(device)
    # fp32 means fp32: equality with a reference is what it is used for.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.cuda.set_stream(torch.cuda.Stream(device))


def _uses_graphs(
    config: EngineConfig, ranks: Ranks, device: torch.device, backend: Backend
) -> bool:
    """Where the device is a GPU, no collective waits for the host, and none is to be compared."""
    talks = any(group.is_active for group in (ranks.groups.tp, ranks.groups.dp))
    exchange = ranks.groups.exchange
    is_capturable = exchange is None or exchange.is_capturable
    if talks and (backend != "nccl" or not is_capturable or config.device.check_collectives):
        return False
    return device.type == "cuda" and not config.device.enforce_eager


def compute_dtype(config: EngineConfig, files: ModelFiles) -> torch.dtype:
    """What was asked for; else the checkpoint's own. Dequantised weights become float16."""
    if config.model.dtype != "auto":
        return DTYPES[config.model.dtype]
    if files.kind == "gguf":
        return torch.float16
    stored = files.config.get("dtype") or files.config.get("torch_dtype")
    return DTYPES.get(str(stored), torch.float32)


def formats(dtype: torch.dtype, device: torch.device) -> WeightFormats:
    linear = cuda_linear(dtype, device) if device.type == "cuda" else dense(dtype, device)
    name = str(dtype).removeprefix("torch.")
    return WeightFormats(
        linear, dtype, dtype, device, name=name, compute=dtype, has_fixed_shapes=True
    )


def _slots(
    config: EngineConfig, found: list[Found], max_model_len: int, device: torch.device
) -> Slots:
    spec_config, vocab_size = config.speculative, found[0].spec.vocab_size
    keeps_probs = spec_config is not None and spec_config.draft_sample_method == "probabilistic"
    return Slots(
        config.scheduler.sizes[0],
        max_model_len,
        spec_config.num_speculative_tokens if spec_config else 0,
        vocab_size,
        device,
        draft_vocab_size=vocab_size if keeps_probs and len(found) > 1 else 0,
    )


def _capacity(config: EngineConfig, slots: Slots) -> Capacity:
    """Uniform steps may be padded beyond what a plan may hold; mixed ones are rounded up."""
    _, budget = config.scheduler.sizes
    rounded = -(-budget // EAGER_TOKENS) * EAGER_TOKENS
    tokens = max(rounded, slots.num_slots * (slots.max_k + 1))
    return Capacity(slots.num_slots, tokens, slots.max_k)


def _max_row_appends(k: int, drafter: Drafter, page_size: int) -> int:
    """Pages that one step may bring to a row; prompts bring theirs when they are admitted.

    A row's bound moves by a window at most, by another one where its k grew, and the drafter
    looks ahead of it.
    """
    positions = 2 * (k + 1) + drafter.lookahead
    return -(-positions // page_size) + 1 + _AHEAD


def _num_pages(
    config: EngineConfig,
    specs: list[ModelSpec],
    needed: int,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    ranks: Ranks,
) -> int:
    """`needed` are the bytes of steps."""
    bytes_per_token = token_bytes(specs, dtype.itemsize)
    gpu = None
    if device.type == "cuda":
        # A draft is loaded after its pages exist; its weights are counted here.
        draft = sum(spec.num_parameters for spec in specs[1:]) * dtype.itemsize
        gpu = _memory(ranks, draft + needed)
    count = num_pages(
        config.cache,
        page_bytes(config.cache.block_size, bytes_per_token),
        max_model_len=max_model_len,
        max_num_seqs=config.scheduler.sizes[0],
        gpu=gpu,
        cpu_free_bytes=1 << 40,
    )
    return ranks.smallest("pages", count)


def _memory(ranks: Ranks, needed: int) -> MemoryReading:
    """What there is and what is taken, with what the steps will need."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    if ranks.num_on_gpu > 1:
        # Others load at the same time: what they take is in their share, not in ours.
        return MemoryReading(total // ranks.num_on_gpu, torch.cuda.memory_reserved() + needed)
    return MemoryReading(total, total - free + needed)


def _sizes(spec: ModelSpec, capacity: Capacity, buckets: Buckets, dtype: torch.dtype) -> StepSizes:
    qkv_width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_size
    rows, vocab_size = capacity.logits, spec.vocab_size
    return StepSizes(
        tokens=capacity.tokens + capacity.rows,
        captured_tokens=buckets.mixed_tokens[-1] + capacity.rows,
        layer_width=4 * spec.hidden_size + 2 * qkv_width + spec.mlp_width,
        itemsize=dtype.itemsize,
        logits_bytes=4 * rows * vocab_size + scratch_bytes(rows, vocab_size),
    )


def _info(
    config: EngineConfig,
    found: list[Found],
    specs: list[ModelSpec],
    parts: Device,
    dtype: torch.dtype,
    row_appends: int,
) -> RunnerInfo:
    is_gpu = parts.slots.device.type == "cuda"
    return runner_info(
        config,
        found,
        (parts.slots, parts.pages),
        parts.drafter,
        sum(token_bytes(specs, dtype.itemsize)),
        pays_for_missing_drafts=True,
        max_row_appends=row_appends,
        device=torch.cuda.get_device_name() if is_gpu else "cpu",
        dtype=str(dtype).removeprefix("torch."),
        weights_bytes=parts.model.nbytes,
    )
