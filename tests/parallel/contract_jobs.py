"""What single ranks do in tests/parallel/test_contract.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from paceline.errors import CollectiveError
from paceline.parallel.groups import GroupOptions, open_groups
from paceline.parallel.lockstep import open_lockstep, smallest
from paceline.parallel.placement import Layout, RankPlace
from paceline.step import StepAgreement, StepProposal, StepSize
from tests.parallel.ranks import place_in
from tests.patience import wait_for


def _place(rank: int, folder: Path, name: str, layout: Layout) -> RankPlace:
    inner = folder / name
    inner.mkdir(parents=True, exist_ok=True)
    return place_in(inner, rank, layout)


def sums(rank: int, folder: Path) -> dict[str, Any]:
    """Every collective over three ranks, of several types, empty ones too."""
    place = _place(rank, folder, "sums", Layout(3, 1))
    group = open_groups(place, GroupOptions(timeout_s=30, checks=True)).tp
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        x = (torch.arange(6).reshape(3, 2) + 10 * rank).to(dtype)
        found[f"reduce {dtype}"] = group.all_reduce(x.clone())
        found[f"gather {dtype}"] = group.all_gather(x)
        found[f"scatter {dtype}"] = group.reduce_scatter(x)
    rows = torch.arange(6.0).reshape(6, 1) + 100 * rank
    send = [[1, 2, 3], [0, 6, 0], [2, 0, 1]]
    mine = rows[: sum(send[rank])]
    found["rows"] = group.all_to_all(mine, send[rank], [s[rank] for s in send])
    found["empty"] = group.all_gather(torch.empty(0, 4))
    tenths = torch.tensor([0.1, 1e8, -1e8][rank : rank + 1])
    found["order"] = group.all_reduce(tenths.clone())
    found["records"] = list(group.contract.records)
    return found


def disagree(rank: int, folder: Path) -> str:
    """Rank 1 brings another type."""
    place = _place(rank, folder, "disagree", Layout(2, 1))
    groups = open_groups(place, GroupOptions(timeout_s=30, checks=True))
    groups.contract.step, groups.contract.phase = 5, "draft 2"
    dtype = torch.int64 if rank else torch.int32
    try:
        groups.tp.all_gather(torch.zeros(2, dtype=dtype))
    except CollectiveError as error:
        return str(error)
    return "nothing"


def stay_away(rank: int, folder: Path) -> str:
    """Rank 1 announces a collective in another phase, and never comes to the next one."""
    place = _place(rank, folder, "away", Layout(2, 1))
    groups = open_groups(place, GroupOptions(timeout_s=1.5))
    groups.contract.step, groups.contract.phase = 3, "target"
    groups.tp.all_gather(torch.zeros(1))
    if rank:
        wait_for((folder / "result0").exists)
        return "late"
    groups.contract.phase = "draft 1"
    try:
        groups.tp.all_gather(torch.zeros(1))
    except CollectiveError as error:
        return str(error)
    return "nothing"


def agreements(rank: int, folder: Path) -> dict[str, Any]:
    """Four ranks in two replicas: leaders agree, and all find the least of their numbers."""
    place = _place(rank, folder, "agree", Layout(2, 2, True))
    least = smallest(place, "pages", 100 - rank)
    if not place.is_leader:
        return {"least": least}
    lockstep = open_lockstep(place, GroupOptions(timeout_s=30, checks=True))
    proposals = [
        [StepProposal(StepSize(5, 7, 3, 2, 0, False, True), True, True), StepProposal()],
        [
            StepProposal(StepSize(2, 2, 1, 4, 2, True, False), True, True),
            StepProposal(has_spare_time=True),
        ],
    ]
    agreed: list[StepAgreement] = [lockstep.agree(proposals[place.dp_rank][i]) for i in range(2)]
    return {"least": least, "agreed": agreed, "number": lockstep.number}


def die(rank: int, folder: Path) -> str:
    """Rank 1 is gone in the middle of things."""
    place = _place(rank, folder, "die", Layout(2, 1))
    groups = open_groups(place, GroupOptions(timeout_s=60))
    groups.tp.all_gather(torch.zeros(1))
    if rank:
        torch.save("gone", folder / f"result{rank}")
        os._exit(0)
    try:
        groups.tp.all_gather(torch.zeros(1))
    except CollectiveError as error:
        return str(error)
    return "nothing"
