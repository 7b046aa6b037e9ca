"""Start-up on a GPU: one compute type, memory measured after the target is loaded, graphs.

The device is a GPU; in tests it may be the CPU, with the kernels' references and no graphs.
"""

from __future__ import annotations

import torch

from paceline.drafters.base import Drafter
from paceline.kernels.gpu.device import open_compiler
from paceline.kernels.step_rows import PacketLayout
from paceline.layers.fp8 import fp8_linear
from paceline.layers.linear import cuda_linear, dense
from paceline.models.reader import WeightFormats
from paceline.models.spec import ModelSpec
from paceline.parallel.groups import Backend
from paceline.runner.captures import Captures
from paceline.runner.graphs import GraphKey, Graphs, Part
from paceline.runner.load_models import Found, Progress, wanted_length
from paceline.runner.padded_rows import PaddedSource
from paceline.runner.platform import DTYPES, Execution, Models
from paceline.runner.ranks import Ranks
from paceline.runner.runner import StepRunner
from paceline.runner.shapes import EAGER_TOKENS, Buckets
from paceline.runner.sizing import MemoryReading, StepSizes, kv_budget, step_bytes
from paceline.runner.step import Device, Forwarded, step_a, step_b
from paceline.runner.streams import DirectStream
from paceline.sampling.verify import NO_EXTRAS, Extras, scratch_bytes
from paceline.state.step_buffers import Capacity, StepBuffers
from paceline.step import MARKS

# Pages that a row may take in advance: it asks for them less often, and packets stay short.
_AHEAD = 3


class CudaPlatform:
    """See runner.platform.Platform."""

    def __init__(self, device: torch.device, backend: Backend = "gloo") -> None:
        self.device = device
        self.backend = backend
        self.is_gpu = device.type == "cuda"
        if self.is_gpu:
            open_compiler()
            torch.cuda.set_device(device)
            # fp32 means fp32: equality with a reference is what it is used for.
            torch.backends.cuda.matmul.allow_tf32 = False
            torch.cuda.set_stream(torch.cuda.Stream(device))

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name() if self.is_gpu else "cpu"

    def formats(self, models: Models, found: Found) -> WeightFormats:
        """A draft computes in the target's type."""
        dtype = self.kv_dtype(models)
        linear = cuda_linear(dtype, self.device) if self.is_gpu else dense(dtype, self.device)
        name = str(dtype).removeprefix("torch.")
        return WeightFormats(
            *(linear, dtype, dtype, self.device),
            name=f"fp8, {name}" if found.is_fp8 else name,
            compute=dtype,
            has_fixed_shapes=True,
            fp8=fp8_linear(dtype, self.device) if found.is_fp8 else None,
            rounds_by=found.rounds_by,
        )

    def kv_dtype(self, models: Models) -> torch.dtype:
        """What was asked for; else the checkpoint's own. Dequantised weights become float16."""
        files, asked = models.found[0].files, models.config.model.dtype
        if asked != "auto":
            return DTYPES[asked]
        if files.kind == "gguf":
            return torch.float16
        stored = files.config.get("dtype") or files.config.get("torch_dtype")
        return DTYPES.get(str(stored), torch.float32)

    def max_model_len(self, models: Models) -> int:
        return wanted_length(models.config, models.found)[0]

    def kv_budget(self, models: Models) -> int:
        cache, dtype = models.config.cache, self.kv_dtype(models)
        if not self.is_gpu:
            return kv_budget(cache, None, 1 << 40)
        # A draft is loaded after its pages exist; its weights are counted here.
        draft = sum(
            spec.weight_bytes(dtype.itemsize, is_fp8=found.is_fp8)
            for spec, found in zip(models.specs[1:], models.found[1:], strict=True)
        )
        capacity, buckets = _capacity(models), self._buckets(models)
        steps = [
            _sizes(spec, capacity, buckets, dtype, capacity.logits if i else capacity.rows)
            for i, spec in enumerate(models.specs)
        ]
        return kv_budget(cache, _memory(models.ranks, draft + step_bytes(steps)), 0)

    def packet_layout(self, models: Models, drafter: Drafter) -> PacketLayout:
        appends = _max_row_appends(models.window_k, drafter, models.config.cache.block_size)
        num_marks = 0 if models.specs[0].recurrent is None else MARKS
        return PacketLayout.of(models.num_slots, models.num_slots * appends, num_marks)

    def execution(self, models: Models, parts: Device, layout: PacketLayout) -> Execution:
        buckets, buffers = self._buckets(models), StepBuffers(_capacity(models), self.device)
        source = PaddedSource(parts, buffers, layout, buckets)

        run = _Steps(parts, source).run
        graphs = Graphs(run, self.device) if self._uses_graphs(models) else None
        empty = source.writer.write_empty
        captures = Captures(run, empty, buckets, graphs, compiles=self.is_gpu)
        return Execution(source, DirectStream, captures)

    def prepare(self, runner: StepRunner, models: Models, progress: Progress) -> None:
        runner.prepare(progress)

    def _buckets(self, models: Models) -> Buckets:
        """The same on every rank: of the whole target's weights."""
        target, itemsize = models.found[0], self.kv_dtype(models).itemsize
        weight_bytes = target.spec.weight_bytes(itemsize, is_fp8=target.is_fp8)
        num_slots, num_tokens = models.config.scheduler.sizes
        sizes = (num_slots, num_tokens, models.max_k)
        speculative = models.config.speculative
        tiers = speculative.k_tiers if speculative else ()
        has_model = any(draft.head is None for draft in models.found[1:])
        where = (weight_bytes, models.window_k, tiers)
        return Buckets.of(*sizes, *where, has_draft_model=has_model)

    def _uses_graphs(self, models: Models) -> bool:
        """Where the device is a GPU, no collective waits for the host, and none is compared."""
        groups, options = models.ranks.groups, models.config.device
        is_capturable = groups.exchange is None or groups.exchange.is_capturable
        if any(group.is_active for group in (groups.tp, groups.dp)) and (
            self.backend != "nccl" or not is_capturable or options.check_collectives
        ):
            return False
        return self.is_gpu and not options.enforce_eager


class _Steps:
    """What captured steps run. Between A and B it holds what A has left, and nothing after."""

    def __init__(self, parts: Device, source: PaddedSource) -> None:
        self._parts = parts
        self._source = source
        self._half: Forwarded | None = None

    def run(self, key: GraphKey) -> None:
        parts, is_late = self._parts, key.part is not Part.WHOLE
        if key.part is Part.B:
            forwarded, self._half = self._half, None
            assert forwarded is not None, "B runs after A"
        else:
            builder = self._source.of_shape(key.shape)
            forwarded = step_a(parts, builder, is_late=is_late)
        if key.part is Part.A:
            self._half = forwarded
            return
        extras = Extras(late=self._source.writer.masks(key.shape)) if is_late else NO_EXTRAS
        step_b(parts, forwarded, key.mode, extras, is_late=is_late)


def _capacity(models: Models) -> Capacity:
    """Uniform steps may be padded beyond what a plan may hold; mixed ones are rounded up."""
    num_slots, budget = models.config.scheduler.sizes
    rounded = -(-budget // EAGER_TOKENS) * EAGER_TOKENS
    most = num_slots * (models.window_k + 1)
    return Capacity(num_slots, max(rounded, most), models.window_k)


def _max_row_appends(k: int, drafter: Drafter, page_size: int) -> int:
    """Pages that one step may bring to a row; prompts bring theirs when they are admitted.

    A row's bound moves by a window at most, by another one where its k grew, and the drafter
    looks ahead of it.
    """
    positions = 2 * (k + 1) + drafter.lookahead
    return -(-positions // page_size) + 1 + _AHEAD


def _memory(ranks: Ranks, needed: int) -> MemoryReading:
    """What there is and what is taken, with what the steps will need."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    if ranks.num_on_gpu > 1:
        # Others load at the same time: what they take is in their share, not in ours.
        return MemoryReading(total // ranks.num_on_gpu, torch.cuda.memory_reserved() + needed)
    return MemoryReading(total, total - free + needed)


def _sizes(
    spec: ModelSpec, capacity: Capacity, buckets: Buckets, dtype: torch.dtype, more: int
) -> StepSizes:
    """`more`: entries beside the target's: a sampled token of each row, or a block of masks."""
    qkv_width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_size
    rows, vocab_size = capacity.logits, spec.vocab_size
    return StepSizes(
        tokens=capacity.tokens + more,
        captured_tokens=buckets.mixed_tokens[-1] + more,
        layer_width=4 * spec.hidden_size + 2 * qkv_width + spec.mlp_width,
        itemsize=dtype.itemsize,
        # A mask has a bit for each logit.
        logits_bytes=4 * rows * vocab_size
        + rows * vocab_size // 8
        + scratch_bytes(rows, vocab_size),
    )
