"""The processors of a step, in their one order. Each touches only rows whose slot asks for it.

Writes logits in place, never slot state. Window position j of a row sees the j drafts before it.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from paceline.kernels.masks import add_bias, ban_early_stops, keep_allowed
from paceline.kernels.penalties import Penalties, apply_penalties, ban_bad_words
from paceline.kernels.rows import LogitRows
from paceline.sampling.custom import CustomProcessors
from paceline.sampling.window import Window
from paceline.state.slots import ALLOWED, BAD_WORDS, BIAS, CUSTOM, MIN_TOKENS, PENALTIES, Slots


def logit_rows(window: Window) -> LogitRows:
    """Every logits row of a step, as processors see it."""
    return LogitRows(
        row_N=window.start_B.index_select(0, window.row_N) + window.offset_N,
        slot_N=window.slot_N,
        offset_N=window.offset_N,
        length_N=window.length_B.index_select(0, window.row_N),
        draft_NK=window.draft_BK.index_select(0, window.row_N),
    )


def process_logits(
    logits_NV: Tensor,
    rows: LogitRows,
    slots: Slots,
    *,
    custom: CustomProcessors | None,
    late_bits_NV: Tensor | None,
) -> None:
    """Everything between the model's logits and the temperature."""
    features_S = slots.features_S
    present = _present(features_S, rows.slot_N)
    if present & ALLOWED:
        allowed = rows.having(features_S, ALLOWED)
        keep_allowed(logits_NV, allowed.row_N, slots.allowed_bits_SV[allowed.slot_N])
    if present & BAD_WORDS:
        worded = rows.having(features_S, BAD_WORDS)
        ban_bad_words(logits_NV, worded, slots.tokens_SL, slots.bad_words_SEE)
    if present & MIN_TOKENS:
        held = rows.having(features_S, MIN_TOKENS)
        stops = (slots.eos_ids_SE, slots.stop_ids_SE)
        ban_early_stops(logits_NV, held, slots.min_len_S, *stops)
    if present & BIAS:
        biased = rows.having(features_S, BIAS)
        add_bias(logits_NV, biased, slots.bias_ids_SE, slots.bias_values_SE)
    if present & PENALTIES:
        penalised = rows.having(features_S, PENALTIES)
        penalties = Penalties(slots.repetition_S, slots.presence_S, slots.frequency_S)
        apply_penalties(logits_NV, penalised, slots.tokens_SL, slots.prompt_len_S, penalties)
    if custom is not None and present & CUSTOM:
        custom.apply(logits_NV, rows, slots)
    if late_bits_NV is not None:
        keep_allowed(logits_NV, rows.row_N, late_bits_NV[rows.row_N])


def _present(features_S: Tensor, slot_N: Tensor) -> int:
    """Features that some row has. A captured step cannot ask, and runs every processor."""
    if not features_S.is_cpu:
        return -1
    return int(np.bitwise_or.reduce(features_S.numpy()[slot_N.numpy()]))  # CPU-only shortcut
