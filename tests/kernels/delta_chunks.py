"""The delta rule in chunks, in torch; and checks of the two kernels of chunks, each alone.

They say which of the kernels is wrong if the two together are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.kernels.delta_rule.reference import (
    DeltaRows,
    DeltaSizes,
    DeltaState,
    DeltaWeights,
    Heads,
    apply_rows,
    delta_rule,
    prepare,
)
from tests.kernels.cases.delta_rule import Named, Row, arguments
from tests.kernels.cases.pairs import TOLERANCE, Arguments

CPU = torch.device("cpu")
SIZE = 64
ROWS = [Row(100, 30), Row(3, 7), Row(66), Row(300), Row(70, 200, marks=(230, 256))]


def delta_rule_chunked(
    input_TP: Tensor, weights: DeltaWeights, sizes: DeltaSizes, state: DeltaState, rows: DeltaRows
) -> Tensor:
    """The rule by products of matrices, SIZE positions at once."""
    return apply_rows(SIZE, _chunk, input_TP, weights, sizes, state, rows)


def _chunk(state_NVK: Tensor, heads: Heads) -> Tensor:
    """Apply some positions at once. With S the state and G_i the sum of log decays up to i:

    delta_i = beta_i (v_i - e^G_i S k_i - sum over j < i of e^(G_i - G_j) (k_i . k_j) delta_j)
    """
    query_NIK, key_NIK, value_NIV = (x.transpose(0, 1) for x in heads[:3])
    log_decay_NI, beta_NI1 = heads.log_decay_IN.cumsum(0).T, heads.beta_IN.T[..., None]
    from_start_NI1 = log_decay_NI.exp()[..., None]
    to_end_NI1 = (log_decay_NI[:, -1:] - log_decay_NI).exp()[..., None]
    between_NII = (log_decay_NI[:, :, None] - log_decay_NI[:, None, :]).tril().exp().tril()
    products_NII = beta_NI1 * (key_NIK @ key_NIK.mT) * between_NII
    wanted_NIV = beta_NI1 * (value_NIV - from_start_NI1 * (key_NIK @ state_NVK.mT))
    delta_NIV = torch.linalg.solve_triangular(
        products_NII.tril(-1), wanted_NIV, upper=False, unitriangular=True
    )
    out_NIV = from_start_NI1 * (query_NIK @ state_NVK.mT)
    out_NIV += (query_NIK @ key_NIK.mT * between_NII) @ delta_NIV
    state_NVK *= from_start_NI1[:, -1:]
    state_NVK += (delta_NIV * to_end_NI1).mT @ key_NIK
    return out_NIV.transpose(0, 1)


def named(sizes: DeltaSizes, num_chunks: int | None = None) -> Named:
    rows = ROWS if num_chunks is None else [Row(num_chunks * SIZE), Row(1, 3)]
    return Named("", rows, sizes, max_k=3)


def plain_chunks(given: Arguments) -> Iterator[dict[str, Tensor]]:
    """By chunk, in order: what is known of it before its state is. Rows of few queries have none;
    all others here are final."""
    input_TP, weights, sizes, state, rows = given
    taps = sizes.conv_size - 1
    for b, count in enumerate(rows.query_len_B.tolist()):
        if count <= 8:
            continue
        start, first = int(rows.start_B[b]), int(rows.row_start_B[b])
        kept_RP = state.input_SRP[int(rows.slot_B[b])]
        before = torch.arange(start - taps, start)
        old_P = kept_RP[before % len(kept_RP)].masked_fill((before < 0)[:, None], 0)
        heads = prepare(torch.cat((old_P, input_TP[first : first + count])), weights, sizes)
        for begin in range(0, count, SIZE):
            part = [x[begin : begin + SIZE].transpose(0, 1) for x in heads]
            query, key, value, log_decay, beta = part
            decay = log_decay.cumsum(1)
            beta = beta[..., None]
            between = (decay[:, :, None] - decay[:, None, :]).tril().exp().tril()
            lower = (beta * (key @ key.mT) * between).tril(-1)
            wanted = torch.cat((beta * decay.exp()[..., None] * key, beta * value), dim=2)
            solved = torch.linalg.solve_triangular(lower, wanted, upper=False, unitriangular=True)
            w, u = solved.split((sizes.key_size, sizes.value_size), dim=2)
            attention = query @ key.mT * between
            group = sizes.num_value_heads // sizes.num_key_heads
            query, key = query[::group], key[::group]
            names = ("query", "key", "attention", "w", "u", "log decay")
            yield dict(zip(names, (query, key, attention, w, u, decay), strict=True))


def check_prepared(device: torch.device, dtype: torch.dtype, sizes: DeltaSizes) -> None:
    from paceline.kernels.delta_rule.triton.apply import prepare_chunks

    make = arguments(named(sizes))
    chunks = prepare_chunks(*make(device, dtype))
    bound = TOLERANCE[dtype]
    for z, wanted in enumerate(plain_chunks(make(CPU, dtype))):
        for found_ZN, (name, want) in zip(chunks, wanted.items(), strict=True):
            part = tuple(slice(0, n) for n in want.shape)
            assert_close(found_ZN[z][part], want, bound, f"{name} of chunk {z}")


def assert_close(found: Tensor, want: Tensor, bound: float, what: str) -> None:
    try:
        found, want = found.float().cpu(), want.float()
        torch.testing.assert_close(found, want, atol=bound, rtol=bound, equal_nan=True)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from None


def check_passed(
    device: torch.device, dtype: torch.dtype, sizes: DeltaSizes, num_chunks: int | None = None
) -> None:
    """All of it; states are compared more closely than what positions read."""
    from paceline.kernels.delta_rule.triton import apply

    make = arguments(named(sizes, num_chunks))
    given, plain = make(device, dtype), make(CPU, dtype)
    out_TV, wanted_TV = apply.delta_rule(*given), delta_rule(*plain)
    bound = TOLERANCE[dtype]
    for name, found, want in [
        ("states", given[3].state_SNVK, plain[3].state_SNVK),
        ("snapshots", given[3].saved_state_ENVK, plain[3].saved_state_ENVK),
        ("outputs", out_TV, wanted_TV),
    ]:
        scale = want.float().nan_to_num().abs().max().item()
        assert_close(found / scale, want / scale, bound, name)


def check_interpreted() -> None:
    for sizes in (DeltaSizes(1, 2, 32, 64), DeltaSizes(1, 3, 24, 40)):
        for dtype in (torch.float32, torch.float16):
            check_prepared(CPU, dtype, sizes)
            check_passed(CPU, dtype, sizes)
