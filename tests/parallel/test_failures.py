"""What a user sees if ranks disagree or one of them hangs: which rank, where, and the end."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from paceline import SamplingParams
from paceline.config import EngineConfig
from paceline.engine.client import EngineClient
from paceline.engine.launch import DEFAULT_FACTORY
from paceline.errors import EngineDead
from tests.e2e.ladder import PROMPTS, Workshop
from tests.engine.echo_client import Stream, pump_for_ever, pump_until_finished
from tests.engine.test_client_process import wait_gone
from tests.parallel.layouts import LAYOUTS
from tests.parallel.saboteur import (
    OTHER_SEED,
    OTHER_SHAPE,
    SLOW_LEADER,
    SLOW_LOADER,
    STEP,
    STUCK_DEVICE,
    STUCK_LEADER,
)
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.usefixtures("_forks")

TWO_RANKS = pytest.mark.parametrize(
    "layout", ["tp2", pytest.param("dp2-ep", marks=pytest.mark.more)]
)
STALL_S = 2.0


@contextmanager
def client_of(
    workshop: Workshop, layout: str, factory: str = DEFAULT_FACTORY, **options: Any
) -> Iterator[EngineClient]:
    """A `layout` "" is one rank."""
    config = EngineConfig.from_keywords(
        model=workshop.target_folder("mixtral"),
        dtype="float32",
        skip_tokenizer_init=True,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        cpu_threads=1,
        **(LAYOUTS[layout] if layout else {}),
        **options,
    )
    client = EngineClient.start(config, factory=factory)
    try:
        yield client
    finally:
        client.close()


def submit(client: EngineClient, max_tokens: int, temperature: float = 0) -> Stream:
    stream = Stream()
    params = SamplingParams(
        temperature=temperature, seed=1, max_tokens=max_tokens, ignore_eos=True, detokenize=False
    )
    stream.generation = client.submit("one", PROMPTS[2], params, on_deltas=stream)
    return stream


def assert_all_gone(pids: list[int]) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    assert all(wait_gone(pid, max(0.0, give_up_s - time.monotonic())) for pid in pids)


@TWO_RANKS
def test_ranks_that_disagree_end_with_the_step_the_phase_and_both_rows(
    layout: str, workshop: Workshop
) -> None:
    with client_of(workshop, layout, OTHER_SHAPE, check_collectives=True) as client:
        pids = client.engine_pids
        stream = submit(client, 30)
        with pytest.raises(EngineDead) as caught:
            pump_for_ever(client)
        said = str(caught.value)
        group = "tp" if layout == "tp2" else "dp"
        rows = re.findall(
            rf"\[step (\d+), (\w+): (\w+) over {group} of (\w+) \[(\d+), \d+\]\]", said
        )
        assert len(rows) == 2, said
        (step, phase, operation, dtype, count), other = rows
        assert (step, phase) == ("5", "target")
        assert other[:4] == (step, phase, operation, dtype)
        assert abs(int(other[4]) - int(count)) == 1
        assert "rank 0" in said
        assert "rank 1" in said
        assert stream.last().finish_reason == "error"
        assert_all_gone(pids)


@pytest.mark.parametrize(
    ("layout", "victim", "checks"),
    [
        pytest.param("tp2", 0, True, marks=pytest.mark.more),
        ("tp2", 1, False),
        pytest.param("dp2-ep", 0, False, marks=pytest.mark.more),
        ("dp2-ep", 1, True),
        pytest.param("dp4-ep", 2, False, marks=pytest.mark.more),
    ],
)
def test_a_rank_that_stands_still_is_named_with_its_phase_and_all_ranks_end(
    layout: str, victim: int, checks: bool, workshop: Workshop
) -> None:
    """Of four ranks too, though the others, who only wait, look the same in the collective log."""
    options: dict[str, Any] = {"stall_timeout": STALL_S, "check_collectives": checks}
    with client_of(workshop, layout, **options) as client:
        pids = client.engine_pids
        stream = submit(client, 200)
        while len(stream.token_ids()) < 5:
            client.pump(1.0)
        os.kill(pids[victim], signal.SIGSTOP)
        with pytest.raises(EngineDead) as caught:
            pump_for_ever(client)
        said = str(caught.value)
        others = "".join(str(rank) for rank in range(len(pids)) if rank != victim)
        assert re.search(
            rf"gone: rank {victim} \(replica \d\) did not answer; rank [{others}] ", said
        )
        waited = rf"rank [{others}] waited in vain for (\d+\.\d) s in step \d+, \w+; last seen: "
        found = re.search(rf"{waited}.*rank {victim} at \[step \d+, \w+[:\]]", said)
        assert found is not None, said
        assert float(found[1]) >= STALL_S
        assert_all_gone(pids)


def test_a_leader_that_hangs_between_two_steps_says_so_itself(workshop: Workshop) -> None:
    """No collective is under way then: its peers wait for a plan, and give it longer."""
    with client_of(workshop, "tp2", STUCK_LEADER, stall_timeout=STALL_S) as client:
        pids = client.engine_pids
        stream = submit(client, 1)
        pump_until_finished(client, stream)
        time.sleep(2 * STALL_S + 1)
        submit(client, 30)
        with pytest.raises(EngineDead) as caught:
            pump_for_ever(client)
        assert "gone: rank 0 (replica 0): step 5 has not returned for" in str(caught.value)
        assert_all_gone(pids)


def test_a_device_step_that_never_ends_is_named(workshop: Workshop) -> None:
    """Of a rank that is alone: there is no other one to miss it."""
    with client_of(workshop, "", STUCK_DEVICE, stall_timeout=STALL_S) as client:
        pids = client.engine_pids
        stream = submit(client, 30)
        with pytest.raises(EngineDead, match=rf"step {STEP} has not returned for .*'wait'"):
            pump_for_ever(client)
        assert stream.last().finish_reason == "error"
        assert_all_gone(pids)


@pytest.mark.more  # tests/engine/test_peers.py has the rule without ranks
@TWO_RANKS
def test_a_leader_that_freezes_while_all_rest_is_missed(layout: str, workshop: Workshop) -> None:
    """Whoever gets the next request: that one would wait for it in vain."""
    with client_of(workshop, layout, stall_timeout=STALL_S) as client:
        pids = client.engine_pids
        pump_until_finished(client, submit(client, 3))
        time.sleep(STALL_S)  # longer than two pulses: all sleep
        os.kill(pids[0], signal.SIGSTOP)
        # Its peer says so, or the front, which waits about as long.
        with pytest.raises(EngineDead, match=r"gone: rank 0 \(replica 0\)(:| did not answer;) "):
            pump_for_ever(client)
        assert_all_gone(pids)


@pytest.mark.parametrize(
    ("layout", "drafter"),
    [("tp2", "eagle"), pytest.param("dp2-ep", "draft_model", marks=pytest.mark.more)],
)
def test_a_rank_may_load_for_longer_than_ranks_wait_for_each_other(
    layout: str, drafter: str, workshop: Workshop
) -> None:
    """Its target, before a head is compared with it; its draft, before the first step."""
    options: dict[str, Any] = {"stall_timeout": STALL_S, "check_collectives": True}
    is_head = drafter == "eagle"
    draft = workshop.head_folder("mixtral") if is_head else workshop.draft_folder("mixtral")
    spec = {"method": drafter, "model": draft, "num_speculative_tokens": 2}
    with client_of(workshop, layout, SLOW_LOADER, speculative_config=spec, **options) as client:
        stream = submit(client, 12)
        pump_until_finished(client, stream)
        assert len(stream.token_ids()) == 12


def test_ranks_that_sample_other_tokens_are_found_out_at_once(workshop: Workshop) -> None:
    with client_of(workshop, "tp2", OTHER_SEED, check_collectives=True) as client:
        pids = client.engine_pids
        submit(client, 30, temperature=1.5)
        with pytest.raises(EngineDead) as caught:
            pump_for_ever(client)
        rows = re.findall(
            r"rank (\d) (?:is )?at \[step (\d+), result: tokens over result of checksum (\w+)\]",
            str(caught.value),
        )
        assert [rank for rank, _, _ in rows] == ["0", "1"]
        assert rows[0][1] == rows[1][1]
        assert rows[0][2] != rows[1][2]
        assert_all_gone(pids)


def test_a_leader_that_takes_its_time_keeps_no_peer_from_the_next_step(workshop: Workshop) -> None:
    """A peer without news looks at its last steps, whose tokens the leader has not seen yet; as
    many of them as may be in flight."""
    options: dict[str, Any] = {"stall_timeout": STALL_S, "check_collectives": True}
    options["run_ahead"] = 8
    with client_of(workshop, "tp2", SLOW_LEADER, **options) as client:
        stream = submit(client, 12)
        pump_until_finished(client, stream)
        assert len(stream.token_ids()) == 12
