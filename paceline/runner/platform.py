"""What start-up asks of a device: weight formats, memory, and how steps run there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from paceline.config import EngineConfig
from paceline.drafters.base import Drafter
from paceline.kernels.kv_codes.reference import PAGE_DTYPE
from paceline.kernels.step_rows import PacketLayout
from paceline.models.reader import WeightFormats
from paceline.models.spec import ModelSpec
from paceline.parallel.groups import Backend
from paceline.runner.captures import Captures
from paceline.runner.load_models import Found, Progress
from paceline.runner.ranks import Ranks
from paceline.runner.runner import RowSource, StepRunner
from paceline.runner.sizing import StateBytes, StateShare, num_pages, page_bytes, share_state
from paceline.runner.step import Device
from paceline.runner.streams import Stream
from paceline.state.readback import RingReader
from paceline.state.recurrent import slot_bytes, snapshot_bytes

# Values of --dtype and of a checkpoint's config.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Models:
    """The models of an engine before they are loaded: the target, then the draft if any."""

    config: EngineConfig
    found: list[Found]
    specs: list[ModelSpec]  # this rank's part of each
    ranks: Ranks
    asked_slots: int | None  # --max-num-seqs where it was given

    @property
    def num_slots(self) -> int:
        return self.config.scheduler.sizes[0]

    @property
    def max_k(self) -> int:
        speculative = self.config.speculative
        return speculative.num_speculative_tokens if speculative else 0

    @property
    def window_k(self) -> int:
        """The most drafts that a row verifies: the drafter's or the host's."""
        return max(self.max_k, self.config.max_host_drafts)

    def page_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """How pages hold keys and values of this type, the target's and the draft's."""
        return PAGE_DTYPE if self.config.cache.is_fp8 else dtype

    def token_bytes(self, dtype: torch.dtype) -> list[int]:
        """KV of one token, by model: each at its own layout."""
        itemsize = self.page_dtype(dtype).itemsize
        return [spec.kv_bytes_per_token(itemsize) for spec in self.specs]

    def num_pages(self, max_model_len: int, dtype: torch.dtype, budget: int) -> int:
        """KV pages that fit. Refuses a budget that cannot hold one sequence."""
        cache = self.config.cache
        return num_pages(
            cache,
            page_bytes(cache.block_size, self.token_bytes(dtype)),
            budget=budget,
            max_model_len=max_model_len,
            max_num_seqs=self.num_slots,
        )

    def share_state(self, max_model_len: int, dtype: torch.dtype, budget: int) -> StateShare | None:
        """Slots and snapshots of recurrent state, the same on all ranks; None: there is none."""
        sizes, num_layers = self.specs[0].recurrent, self.specs[0].num_recurrent_layers
        if sizes is None:
            return None
        cache, itemsize = self.config.cache, dtype.itemsize
        state = StateBytes(
            slot_bytes(num_layers, sizes, self.window_k, itemsize),
            snapshot_bytes(num_layers, sizes, itemsize),
        )
        share = share_state(
            cache,
            budget,
            state,
            page_bytes(cache.block_size, self.token_bytes(dtype)),
            max_model_len=max_model_len,
            asked=self.asked_slots,
            default=self.num_slots,
        )
        num_slots = self.ranks.smallest("slots", share.num_slots)
        num_snapshots = self.ranks.smallest("snapshots", share.num_snapshots)
        taken = (num_slots + 1) * state.slot + num_snapshots * state.snapshot
        return StateShare(num_slots, num_snapshots, taken)


class Execution(NamedTuple):
    """How a device runs steps."""

    source: RowSource
    make_stream: Callable[[RingReader], Stream]
    captures: Captures | None = None  # None: steps are never captured


class Platform(Protocol):
    """Where CPU and CUDA differ at start-up. `runner/startup` does everything else."""

    @property
    def device(self) -> torch.device: ...
    @property
    def is_gpu(self) -> bool: ...
    @property
    def name(self) -> str: ...
    @property
    def backend(self) -> Backend: ...

    def formats(self, models: Models, found: Found) -> WeightFormats: ...
    def kv_dtype(self, models: Models) -> torch.dtype: ...

    def max_model_len(self, models: Models) -> int:
        """Called before weights are read: refuse here what cannot fit."""

    def kv_budget(self, models: Models) -> int:
        """Bytes of this rank for pages and recurrent state. Called when the target is loaded."""

    def packet_layout(self, models: Models, drafter: Drafter) -> PacketLayout: ...

    def execution(self, models: Models, parts: Device, layout: PacketLayout) -> Execution: ...

    def prepare(self, runner: StepRunner, models: Models, progress: Progress) -> None:
        """Compile, capture or warm up what the first request needs."""
