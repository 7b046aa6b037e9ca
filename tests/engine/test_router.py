"""Which replica gets a request, counted by the front itself."""

from __future__ import annotations

import pytest

from paceline.engine.router import Router


@pytest.mark.trap("C14")
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
def test_a_burst_is_spread_evenly_before_any_replica_has_said_a_word(num_replicas: int) -> None:
    router = Router(num_replicas)
    for uid in range(8 * num_replicas):
        router.assign([uid])
        assert max(router.num_open) - min(router.num_open) <= 1
    assert router.num_open == [8] * num_replicas


def test_equals_take_turns_so_that_lone_requests_do_not_all_go_to_the_first() -> None:
    router = Router(3)
    taken = []
    for uid in range(6):
        taken.append(router.assign([uid]))
        router.release(uid)
    assert taken == [0, 1, 2, 0, 1, 2]


def test_the_sequences_of_one_request_stay_together_and_count_one_by_one() -> None:
    router = Router(2)
    assert router.assign([1, 2, 3]) == 0
    assert [router.assign([uid]) for uid in (4, 5, 6)] == [1, 1, 1]
    assert {router.owner(uid) for uid in (1, 2, 3)} == {0}
    assert router.num_open == [3, 3]
    for uid in (1, 2, 4):
        router.release(uid)
    assert router.num_open == [1, 2]
    assert router.assign([7]) == 0
