"""What the host is told of a runner: the same facts on every device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.config import EngineConfig
from paceline.drafters.base import Drafter
from paceline.models.spec import ModelSpec
from paceline.runner.finding import Found, kv_window
from paceline.state.pages import Pages
from paceline.state.slots import Slots
from paceline.step import RunnerInfo


def runner_info(
    config: EngineConfig,
    found: list[Found],
    state: tuple[Slots, Pages],
    drafter: Drafter,
    bytes_per_token: int,
    **more: Any,
) -> RunnerInfo:
    """`bytes_per_token`: of KV, on this rank. `more`: what only the device's runner knows."""
    slots, pages = state
    return RunnerInfo(
        num_pages=pages.num_pages,
        page_size=pages.page_size,
        num_slots=slots.num_slots,
        max_model_len=slots.max_model_len,
        vocab_size=slots.vocab_size,
        max_k=drafter.max_k,
        draft_lookahead=drafter.lookahead,
        draft_reads_features=drafter.reads_features,
        kv_window=kv_window(found),
        max_num_batched_tokens=config.scheduler.sizes[1],
        model_name=found[0].files.name,
        kv_cache_bytes=pages.num_pages * pages.page_size * bytes_per_token,
        **more,
    )


def token_bytes(specs: Sequence[ModelSpec], itemsize: int) -> list[int]:
    """KV of one token, by model: each at its own layout."""
    return [spec.kv_bytes_per_token(itemsize) for spec in specs]
