"""The agreement itself, without other ranks: what it asks for and what it never does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.parallel.collectives import SOLO, Group
from paceline.parallel.lockstep import HostLockstep
from paceline.step import StepProposal, StepSize


@pytest.mark.trap("C13")
def test_the_agreement_never_touches_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers in host memory go in and come out; no stream is asked, nothing is copied."""
    seen: list[Tensor] = []

    def all_gather(self: Group, x: Tensor) -> Tensor:
        seen.append(x)
        return torch.stack((x, x))

    def touched(*_: object, **__: object) -> None:
        raise AssertionError("the agreement asked the device")

    monkeypatch.setattr(Group, "all_gather", all_gather)
    for name in ("synchronize", "current_stream", "Event", "Stream"):
        monkeypatch.setattr(torch.cuda, name, touched)
    for name in ("cuda", "pin_memory", "to", "cpu", "item"):
        monkeypatch.setattr(Tensor, name, touched)
    step_size = StepSize(9, 8, 4, 3, 2, False, True)
    lockstep = HostLockstep(SOLO)
    agreed = lockstep.agree(StepProposal(step_size, has_plan=True, is_unfinished=True))
    assert agreed.step_size == step_size
    assert (agreed.has_plan, agreed.is_unfinished, agreed.is_draining) == (True, True, False)
    assert [(x.device.type, x.dtype) for x in seen] == [("cpu", torch.int32)]
    assert lockstep.number == 1
