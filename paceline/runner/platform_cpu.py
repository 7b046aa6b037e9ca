"""Start-up on a CPU: weights as narrow as the checkpoint's, a share of the host's memory.

Steps run in a worker thread, on rows of their true sizes.
"""

from __future__ import annotations

import logging

import torch

from paceline.config import EngineConfig
from paceline.drafters.base import Drafter
from paceline.kernels.step_rows import PacketLayout
from paceline.kernels.table import has_numba
from paceline.layers.fp8 import rounded_linear
from paceline.layers.linear import (
    block_panels,
    exact_linear,
    narrow_panels,
    packed_fp16,
    packed_fp16_works,
)
from paceline.models.reader import WeightFormats
from paceline.observe.memory import host_memory
from paceline.parallel.groups import Backend
from paceline.parallel.placement import RankPlace
from paceline.runner.compact_rows import CompactSource
from paceline.runner.load_models import Found, Progress, kv_window, wanted_length
from paceline.runner.platform import DTYPES, Execution, Models
from paceline.runner.ranks import steps_together
from paceline.runner.runner import StepRunner
from paceline.runner.sizing import kv_budget
from paceline.runner.step import Device
from paceline.runner.streams import ThreadStream
from paceline.runner.warm_up import warm_up
from paceline.speculation import BLOCK_METHODS

logger = logging.getLogger(__name__)

_KV_DTYPE = torch.float32
MOST_LATE = 16


class CpuPlatform:
    """See runner.platform.Platform."""

    device = torch.device("cpu")
    is_gpu = False
    name = "cpu"
    backend: Backend = "gloo"

    def __init__(self, config: EngineConfig, place: RankPlace) -> None:
        num_ranks = place.num_local_ranks
        self._num_threads = config.device.cpu_threads or default_threads(num_ranks)
        self._free_bytes = host_memory().available // num_ranks
        torch.set_num_threads(self._num_threads)

    def formats(self, models: Models, found: Found) -> WeightFormats:
        """fp32 as it is; narrower weights as the checkpoint has them, where the CPU can."""
        files = found.files
        stored = str(files.config.get("dtype") or files.config.get("torch_dtype") or "float32")
        wanted = models.config.model.dtype
        round_to = None if wanted in ("auto", "float32") else DTYPES[wanted]
        if wanted == "auto":
            narrow = files.kind == "gguf" or stored in ("bfloat16", "float16")
        else:
            narrow = wanted != "float32"
        # The table is read a row at a time, so it costs memory and no bandwidth: never rounded.
        # Dequantised values need more bits than half precision has.
        embedding = torch.float32 if files.kind == "gguf" else DTYPES.get(stored, torch.float32)
        linear, name, blocks = exact_linear(self.device), "float32", None
        if narrow and has_numba(self.device):
            linear, blocks = narrow_panels, block_panels
            name = "the checkpoint's weights, float32 activations"
        elif narrow and packed_fp16_works():
            linear, name = packed_fp16, "float16 weights, float32 activations"
        else:
            embedding = torch.float32
            if narrow:
                logger.warning(
                    "this CPU or torch build has no packed fp16 product; computing in float32"
                )
        fp8 = None
        if found.is_fp8:
            fp8, blocks = rounded_linear(linear), None
            name = f"fp8 weights and activations; others: {name}"
        where = (torch.float32, self.device, round_to, name)
        return WeightFormats(
            linear, embedding, *where, blocks=blocks, fp8=fp8, rounds_by=found.rounds_by
        )

    def kv_dtype(self, models: Models) -> torch.dtype:
        return _KV_DTYPE

    def max_model_len(self, models: Models) -> int:
        """What was asked for; else what the models were made for, or the KV cache holds if less."""
        length = self._max_model_len(models)
        models.num_pages(length, _KV_DTYPE, self.kv_budget(models))
        return length

    def _max_model_len(self, models: Models) -> int:
        longest, is_asked = wanted_length(models.config, models.found)
        cache = models.config.cache
        if is_asked or cache.num_gpu_blocks_override is not None:
            return longest
        budget = self.kv_budget(models)
        if models.specs[0].recurrent is not None:
            budget //= 2  # the rest is for states and snapshots
        capacity = budget // sum(models.token_bytes(_KV_DTYPE))
        fitting = max(capacity // cache.block_size - 1, 1) * cache.block_size
        if fitting >= longest:
            return longest
        logger.warning(
            "max_model_len is %d, what the KV cache holds; the model was made for %d: raise "
            "--kv-cache-memory-bytes for longer sequences",
            fitting,
            longest,
        )
        return fitting

    def kv_budget(self, models: Models) -> int:
        free_bytes = max(self._free_bytes - late_bytes(models), 0)
        return kv_budget(models.config.cache, None, free_bytes)

    def packet_layout(self, models: Models, drafter: Drafter) -> PacketLayout:
        """No packet travels: the ring holds the step's number and its results."""
        return PacketLayout.of(0, 0)

    def execution(self, models: Models, parts: Device, layout: PacketLayout) -> Execution:
        source = CompactSource(parts, max_late_rows(models))
        return Execution(source, lambda _: ThreadStream(self._num_threads))

    def prepare(self, runner: StepRunner, models: Models, progress: Progress) -> None:
        progress("warming up", 0.0)
        specs = [found.spec for found in models.found]
        warm_up(runner, is_joint=steps_together(models.ranks.place.layout, specs))


def max_late_rows(models: Models) -> int:
    """Entries of a row that the drafter's first pass may put off. None where pages of a running
    request are registered or given back, or where replicas run the same passes."""
    specs = [found.spec for found in models.found]
    is_fixed = kv_window(models.found) is not None or specs[0].recurrent is not None
    is_fixed |= steps_together(models.ranks.place.layout, specs)
    has_passes = len(specs) > 1 and models.found[1].method not in BLOCK_METHODS
    return MOST_LATE if has_passes and not is_fixed else 0


def late_bytes(models: Models) -> int:
    """Features of the target that a head's late entries keep at most."""
    head = models.found[-1].head  # a draft model keeps none
    if head is None:
        return 0
    width = max(len(getattr(head, "tap_ids", ())), 1) * models.found[0].spec.hidden_size
    return models.num_slots * max_late_rows(models) * width * _KV_DTYPE.itemsize


def default_threads(num_ranks: int = 1) -> int:
    """Every core that torch sees (measured in bench/cpu_peers); ranks share them."""
    return max(torch.get_num_threads() // num_ranks, 1)
