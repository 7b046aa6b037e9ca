"""Logits processors that users bring: loaded by name at start, chosen per request.

Never trusts them: one that fails ends its own request and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.errors import ConfigError, nearest
from paceline.kernels.rows import WindowRows
from paceline.state.slots import CUSTOM, Slots

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SlotView:
    """What a processor may see of its request."""

    tokens: Tensor  # int32: prompt, output and the drafts before this position; read only
    prompt_len: int
    extra_args: Mapping[str, Any]


class LogitsProcessor(Protocol):
    """Built once as `Class(vocab_size, device)`; called for each position of each request."""

    def __call__(self, logits_V: Tensor, slot: SlotView, position: int) -> Tensor:
        """The row to sample from: `logits_V` changed in place, or another float32 [V]."""


class CustomProcessors:
    """The processors named at start, and which slots use which of them."""

    def __init__(self, names: Sequence[str], vocab_size: int, device: torch.device) -> None:
        self._processors = {name: _load(name, vocab_size, device) for name in names}
        self._chosen: dict[int, tuple[tuple[str, ...], Mapping[str, Any]]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._processors)

    def assign(self, slot: int, names: Sequence[str], extra_args: Mapping[str, Any] | None) -> None:
        """A request takes the slot; without names the slot's former choice is forgotten."""
        assert all(name in self._processors for name in names), "engine/checks.py lets none pass"
        if names:
            self._chosen[slot] = (tuple(names), dict(extra_args or {}))
        else:
            self._chosen.pop(slot, None)

    def apply(self, logits_NV: Tensor, windows: WindowRows, slots: Slots) -> None:
        """Run each row's processors, in the order its request named them. Reads the device."""
        rows = windows.on_cpu().logit_rows.having(slots.features_S.cpu(), CUSTOM)
        if rows.draft_MK.shape[1] > 0:
            # Rows behind a missing draft are never used, and -1 is no token to show.
            step_K = torch.arange(rows.draft_MK.shape[1])
            missing_MK = (step_K < rows.offset_M[:, None]) & (rows.draft_MK < 0)
            rows = rows.where(~missing_MK.any(1))
        row_M, slot_M, offset_M, length_M, drafts_MK = (t.tolist() for t in rows[:5])
        for i, slot in enumerate(slot_M):
            names, extra_args = self._chosen.get(slot, ((), {}))
            committed = slots.tokens_SL[slot, : length_M[i]]
            view = SlotView(
                tokens=torch.cat((committed, committed.new_tensor(drafts_MK[i][: offset_M[i]]))),
                prompt_len=int(slots.prompt_len_S[slot]),
                extra_args=extra_args,
            )
            for name in names:
                self._run(name, logits_NV[row_M[i]], view, length_M[i] + offset_M[i])

    def _run(self, name: str, logits_V: Tensor, view: SlotView, position: int) -> None:
        # Foreign code may raise anything; a NaN row makes verification end this request alone.
        try:
            result_V = self._processors[name](logits_V, view, position)
            if result_V is not logits_V:
                if result_V.shape != logits_V.shape:
                    raise ValueError(
                        f"returned shape {tuple(result_V.shape)}, not {tuple(logits_V.shape)}"
                    )
                logits_V.copy_(result_V)
        except Exception:
            logger.exception("logits processor %s failed; its request ends with an error", name)
            logits_V.fill_(torch.nan)


def _load(name: str, vocab_size: int, device: torch.device) -> LogitsProcessor:
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        raise ConfigError(f"logits processor {name!r} must be written as module:Class.")
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"logits processor {name!r}: cannot import {module_name!r} ({error}); put it on "
            "PYTHONPATH."
        ) from error
    kind = getattr(module, class_name, None)
    if kind is None:
        hint = nearest(class_name, vars(module))
        raise ConfigError(f"logits processor {name!r}: {module_name} has no {class_name!r}.{hint}")
    try:
        processor = kind(vocab_size, device)
    except Exception as error:
        raise ConfigError(
            f"logits processor {name!r}: {class_name}(vocab_size, device) failed ({error})."
        ) from error
    if not callable(processor):
        raise ConfigError(
            f"logits processor {name!r} needs __call__(logits, slot, position) -> logits."
        )
    return processor  # type: ignore[no-any-return]
