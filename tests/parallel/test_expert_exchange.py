"""Experts spread over real ranks give what one rank gives, with idle ranks too."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from paceline.errors import CollectiveError, ConfigError
from paceline.kernels.experts.reference import ExpertWeights, Routing, apply_experts, route
from paceline.parallel.collectives import SOLO, Group
from paceline.parallel.contract import Contract
from paceline.parallel.expert_exchange import AllToAll, ExpertExchange, GatherScatter, RoutedRows
from paceline.parallel.placement import Layout
from tests.parallel.ranks import open_checked, run_ranks

EXPERTS, CHOSEN, WIDTH, INNER = 7, 3, 12, 8  # 7 divide over nothing
NUM_RANKS = 4
LAYOUTS = {
    "dp 2": Layout(1, 2, True),
    "dp 3": Layout(1, 3, True),
    "dp 4": Layout(1, 4, True),
    "tp 2": Layout(2, 1, True),
    "tp 2 x dp 2": Layout(2, 2, True),
    "forced": Layout(1, 1, True),  # groups of one that talk to themselves
}
Found = list[dict[tuple[str, str, str], Any]]
BACKENDS = ("allgather_reducescatter", "alltoall")


class Pass(NamedTuple):
    """The rows of each replica in one pass."""

    num_rows: tuple[int, ...]
    most: int | None  # what the ranks agreed on
    dtype: torch.dtype = torch.float32
    nan_row: int | None = None  # of every replica
    favourite: int | None = None  # an expert that every row takes
    has_part: bool = False


PASSES = {
    "as many": Pass((4, 4, 4, 4), None),
    "unequal": Pass((3, 1, 6, 2), 6, has_part=True),
    "one alone": Pass((5, 0, 0, 0), 5),
    "the last alone": Pass((0, 2, 0, 1), 2),
    "padded everywhere": Pass((3, 2, 1, 0), 8),
    "no rows": Pass((0, 0, 0, 0), 0, has_part=True),
    "no rows, fixed shape": Pass((0, 0, 0, 0), 4),
    "nan": Pass((4, 3, 2, 4), 5, nan_row=1),
    "all to one": Pass((4, 7, 0, 1), 7, favourite=5),
    "half": Pass((3, 1, 0, 2), 4, dtype=torch.bfloat16),
}


def weights(dtype: torch.dtype) -> ExpertWeights:
    random = torch.Generator().manual_seed(1)
    gate_up = torch.randn(EXPERTS, 2 * INNER, WIDTH, generator=random) * 0.3
    down = torch.randn(EXPERTS, WIDTH, INNER, generator=random) * 0.3
    return ExpertWeights(gate_up.to(dtype), down.to(dtype))


def rows_of(replica: int, what: Pass) -> RoutedRows:
    random = torch.Generator().manual_seed(10 + replica)
    count = what.num_rows[replica]
    x_TD = torch.randn(count, WIDTH, generator=random)
    logits_TE = torch.randn(count, EXPERTS, generator=random)
    if what.favourite is not None:
        logits_TE[:, what.favourite] += 99.0
    if what.nan_row is not None:
        x_TD[what.nan_row] = logits_TE[what.nan_row] = float("nan")
    return RoutedRows(x_TD.to(what.dtype), *route(logits_TE, None, Routing(CHOSEN)))


def part_of(replica: int, place: int, what: Pass) -> Tensor | None:
    shape = (what.num_rows[replica], WIDTH)
    return torch.full(shape, 1.0 + place) if what.has_part else None


def wanted(replica: int, tp: int, what: Pass) -> Tensor:
    """On one rank, with all experts."""
    sum_TD = apply_experts(*rows_of(replica, what), weights(what.dtype), None, torch.float32)
    return sum_TD + sum(range(1, tp + 1)) if what.has_part else sum_TD


def exchange_job(rank: int, folder: Path) -> dict[tuple[str, str, str], Any]:
    """Every pass over every layout, by both exchanges."""
    found: dict[tuple[str, str, str], Any] = {}
    for layout_name, layout in LAYOUTS.items():
        for backend in BACKENDS:
            if rank >= layout.num_ranks:
                continue
            at = folder / f"{layout_name} {backend}"
            forces = layout_name == "forced"
            groups = open_checked(rank, layout, at, exchange=backend, forces=forces)
            exchange = groups.exchange
            assert exchange is not None
            for name, what in PASSES.items():
                seen = _Experts(exchange, what.dtype)
                replica, place = divmod(rank, layout.tensor_parallel)
                groups.tp.contract.records.clear()
                args = (rows_of(replica, what), EXPERTS, what.most, seen)
                out = exchange.run(*args, part_of(replica, place, what))
                records = list(groups.tp.contract.records)
                found[layout_name, backend, name] = (out, seen.num_rows, records)
    return found


class _Experts:
    """This rank's, and how many rows they were shown."""

    def __init__(self, exchange: ExpertExchange, dtype: torch.dtype) -> None:
        own = exchange.share(EXPERTS)
        self.own = ExpertWeights(*(x[own.start : own.stop] for x in weights(dtype)[:2]))
        self.num_rows = 0

    def __call__(self, rows: RoutedRows) -> Tensor:
        self.num_rows += len(rows.x_TD)
        return apply_experts(*rows, self.own, None, torch.float32)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks("tests.parallel.test_expert_exchange:exchange_job", NUM_RANKS, folder)


@pytest.mark.trap("I9")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_spread_experts_give_what_one_rank_gives(ranks: Found, layout: str, backend: str) -> None:
    tp = LAYOUTS[layout].tensor_parallel
    for name, what in PASSES.items():
        found = [ranks[r][layout, backend, name][0] for r in range(LAYOUTS[layout].num_ranks)]
        for rank, sum_TD in enumerate(found):
            expected = wanted(rank // tp, tp, what)
            assert sum_TD.dtype == torch.float32
            torch.testing.assert_close(
                sum_TD, expected, rtol=1e-5, atol=1e-5, equal_nan=True, msg=f"{name}, rank {rank}"
            )
            first = found[rank // tp * tp]
            assert torch.equal(sum_TD.nan_to_num(), first.nan_to_num()), "equal bits in a replica"
        if what.nan_row is not None:
            assert found[0].isnan().any(1).tolist() == [False, True, False, False]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_calls_the_same_collectives_whether_idle_or_not(
    ranks: Found, layout: str, backend: str
) -> None:
    where = LAYOUTS[layout]
    over_dp = ["all_gather", "reduce_scatter"]
    if backend == "alltoall":
        over_dp = ["all_gather", "all_to_all", "all_to_all"]
    is_forced = layout == "forced"
    expected = over_dp if where.data_parallel > 1 or is_forced else []
    if where.tensor_parallel > 1 or is_forced:
        expected = [*expected, "all_reduce"]
    for name in PASSES:
        records = [ranks[r][layout, backend, name][2] for r in range(where.num_ranks)]
        operations = [x.split(": ")[1].split(" over")[0] for x in records[0]]
        assert operations == expected, name
        for place in range(where.tensor_parallel):
            same_place = records[place :: where.tensor_parallel]
            over = [[x for x in own if " over dp" in x] for own in same_place]
            assert over == [over[0]] * where.data_parallel, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_travels_to_the_ranks_of_its_experts_only(ranks: Found, layout: str) -> None:
    where = LAYOUTS[layout]
    for name, what in PASSES.items():
        for rank in range(where.num_ranks):
            own = range(rank * EXPERTS // where.num_ranks, (rank + 1) * EXPERTS // where.num_ranks)
            chosen = [rows_of(d, what).chosen_TK for d in range(where.data_parallel)]
            if where.data_parallel == 1 and layout != "forced":
                gathered = wanted_rows = len(chosen[0])
            else:
                most = what.num_rows[0] if what.most is None else what.most
                gathered = most * where.data_parallel
                is_own = [(x >= own.start) & (x < own.stop) for x in chosen]
                wanted_rows = sum(int(x.any(1).sum()) for x in is_own)
            assert ranks[rank][layout, BACKENDS[0], name][1] == gathered, name
            assert ranks[rank][layout, BACKENDS[1], name][1] == wanted_rows, name


# ---- without ranks


def member(name: str, size: int, rank: int) -> Group:
    return Group(name, range(size), rank, Contract(), None)


@pytest.mark.parametrize("kind", [GatherScatter, AllToAll])
def test_shares_are_even_in_rank_order_and_every_rank_has_one(
    kind: type[GatherScatter] | type[AllToAll],
) -> None:
    places = [(d, t) for d in range(3) for t in range(2)]  # rank = replica * tp + place
    for num_experts in (6, 7, 11, 64):
        shares = [
            kind(member("tp", 2, t), member("dp", 3, d)).share(num_experts) for d, t in places
        ]
        assert [x for share in shares for x in share] == list(range(num_experts))
        sizes = {len(share) for share in shares}
        assert max(sizes) - min(sizes) <= 1


def test_fewer_experts_than_ranks_are_refused_with_both_numbers() -> None:
    exchange = GatherScatter(member("tp", 2, 0), member("dp", 4, 1))
    with pytest.raises(ConfigError, match=r"7 experts .* 8 ranks .*size 2 x data.* 4\)"):
        exchange.share(7)


@pytest.mark.trap("L-12")
@pytest.mark.parametrize("kind", [GatherScatter, AllToAll])
def test_more_rows_than_agreed_are_refused_before_anything_travels(
    kind: type[GatherScatter] | type[AllToAll], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Group, "is_active", True)
    what = Pass((5,), 4)
    with pytest.raises(CollectiveError, match=r"5 rows .* at most 4"):
        kind(SOLO, SOLO).run(rows_of(0, what), EXPERTS, what.most, lambda rows: rows.x_TD)


def test_only_an_exchange_of_fixed_shapes_may_be_captured() -> None:
    assert GatherScatter(SOLO, SOLO).is_capturable
    assert not AllToAll(SOLO, SOLO).is_capturable
