"""Collectives of real ranks: sums in rank order, contracts that are compared, waits that end."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
import torch

from paceline.errors import EngineDead
from paceline.parallel.contract import CollectiveLog, Contract
from paceline.parallel.groups import GroupOptions, open_groups
from paceline.parallel.placement import Layout, RankPlace
from paceline.step import StepSize
from tests.parallel.ranks import place_in, run_ranks

_JOBS = "tests.parallel.contract_jobs"


def test_collectives_move_every_type_and_add_up_in_rank_order(tmp_path: Path) -> None:
    found = run_ranks(f"{_JOBS}:sums", 3, tmp_path)
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        parts = [(torch.arange(6).reshape(3, 2) + 10 * r).to(dtype) for r in range(3)]
        for rank, result in enumerate(found):
            assert torch.equal(result[f"gather {dtype}"], torch.stack(parts))
            assert torch.equal(result[f"reduce {dtype}"], parts[0] + parts[1] + parts[2])
            mine = parts[0][rank] + parts[1][rank] + parts[2][rank]
            assert torch.equal(result[f"scatter {dtype}"], mine)
    assert [x["rows"][:, 0].tolist() for x in found] == [
        [0.0, 200.0, 201.0],
        [1.0, 2.0, 100.0, 101.0, 102.0, 103.0, 104.0, 105.0],
        [3.0, 4.0, 5.0, 202.0],
    ]
    assert all(list(x["empty"].shape) == [3, 0, 4] for x in found)
    # (0.1 + 1e8) - 1e8 in fp32: what another order would give is 0.1.
    assert [x["order"].item() for x in found] == [0.0] * 3
    assert found[0]["records"] == found[1]["records"] == found[2]["records"]


@pytest.mark.trap("I6")
def test_a_mismatch_names_the_step_the_phase_and_both_rows(tmp_path: Path) -> None:
    for said in run_ranks(f"{_JOBS}:disagree", 2, tmp_path):
        assert "step 5, draft 2: all_gather over tp of int32 [2]" in said
        assert "step 5, draft 2: all_gather over tp of int64 [2]" in said
        assert "rank 0" in said
        assert "rank 1" in said


def test_a_wait_has_a_deadline_and_says_who_was_late_and_where(tmp_path: Path) -> None:
    said = run_ranks(f"{_JOBS}:stay_away", 2, tmp_path)[0]
    found = re.search(r"rank 0 waited in vain for (\d+\.\d) s in step 3, draft 1", said)
    assert found is not None, said
    assert float(found[1]) >= 1.5
    assert "rank 1 at [step 3, target: all_gather over tp of float32 [1]]" in said


def test_a_rank_that_is_gone_is_noticed_before_the_deadline(tmp_path: Path) -> None:
    said = run_ranks(f"{_JOBS}:die", 2, tmp_path)[0]
    assert "Connection" in said, "it waited in vain instead"  # closed or reset, whichever is seen


def test_leaders_agree_on_room_for_all_replicas(tmp_path: Path) -> None:
    found = run_ranks(f"{_JOBS}:agreements", 4, tmp_path)
    assert [x["least"] for x in found] == [97] * 4
    assert found[0]["agreed"] == found[2]["agreed"]
    first, second = found[0]["agreed"]
    assert first.step_size == StepSize(5, 7, 3, 4, 2, False, False)
    assert (first.has_plan, first.is_unfinished, first.is_draining) == (True, True, False)
    assert not second.has_plan
    assert second.has_spare_time
    assert found[0]["number"] == 2


def test_seats_say_who_shares_what() -> None:
    layout = Layout(2, 3, True)
    assert layout.leaders() == [0, 2, 4]
    place = RankPlace(3, layout)
    assert (place.tp_rank, place.dp_rank, place.is_leader) == (1, 1, False)
    assert place.tp_ranks() == [2, 3]
    assert place.dp_ranks() == [1, 3, 5]


def test_the_board_shows_what_a_rank_did_last(tmp_path: Path) -> None:
    log = CollectiveLog(str(tmp_path / "collectives"), 2)
    contract = Contract(1, log)
    assert CollectiveLog(str(tmp_path / "collectives"), 2).latest(1) == ("nothing yet", 0.0)
    for step in range(9):
        contract.step, contract.phase = step, "target"
        contract.enter("dp", [0, 1], "all_gather", "float32 [1]")
    text, age_s = CollectiveLog(str(tmp_path / "collectives"), 2).latest(1)
    assert text == "step 8, target: all_gather over dp of float32 [1]"
    assert age_s < 5


def test_a_board_that_finds_no_room_is_an_error_and_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapped file that was only made longer ends the process at the first write."""

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    path = str(tmp_path / "collectives")
    with pytest.raises(EngineDead, match=rf"{path}, .* its \d+ bytes: No space left on device"):
        CollectiveLog(path, 2)


def test_a_rank_that_talks_to_itself_leaves_nothing_to_look_for(tmp_path: Path) -> None:
    """Its store is in memory: NCCL's threads would wait for a file that is gone."""
    groups = open_groups(place_in(tmp_path, 0, Layout()), GroupOptions(forces=True))
    assert groups.tp.all_reduce(torch.ones(3)).tolist() == [1, 1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["collectives"]
    groups.close()
