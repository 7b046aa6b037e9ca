"""Which replica gets a request, counted by the front itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.router import BLOCK_TOKENS, WORTH_TOKENS, PrefixOwners, Router


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


def test_a_prompt_goes_where_its_beginning_was_computed() -> None:
    router = Router(3, capacity_tokens=1 << 20)
    conversation = list(range(WORTH_TOKENS + 100))
    first = router.assign([1], conversation)
    router.release(1)
    others = {router.assign([uid], [uid] * 4000) for uid in (2, 3)}
    assert first not in others
    router.release(2)
    router.release(3)
    # Least loaded in turn would be another replica.
    assert router.assign([4], [*conversation, 7, 8, 9]) == first


def test_a_short_common_beginning_does_not_gather_requests() -> None:
    router = Router(4, capacity_tokens=1 << 20)
    system_prompt = list(range(WORTH_TOKENS - 1))
    for uid in range(32):
        router.assign([uid], [*system_prompt, uid])
        assert max(router.num_open) - min(router.num_open) <= 1


def test_a_hit_outweighs_only_as_many_sequences_as_it_is_worth() -> None:
    router = Router(2, capacity_tokens=1 << 20)
    prompt = list(range(3 * WORTH_TOKENS))
    first = router.assign([0], prompt)
    assert first is not None
    chosen = [router.assign([uid], prompt) for uid in range(1, 5)]
    # Three more than the other replica has; then the other one computes the prompt too.
    assert chosen == [first, first, first, 1 - first]


def test_a_request_may_name_its_replica() -> None:
    router = Router(3)
    assert [router.assign([uid], replica=2) for uid in range(4)] == [2, 2, 2, 2]
    assert {router.assign([9]), router.assign([10])} == {0, 1}


def test_closed_replicas_get_nothing_and_come_back() -> None:
    router = Router(3, capacity_tokens=1 << 20)
    prompt = list(range(2 * WORTH_TOKENS))
    assert router.assign([0], prompt, replica=1) == 1
    router.closed = {1}
    assert router.assign([2], prompt, replica=1) != 1
    assert router.assign([3], prompt) != 1
    router.closed = {0, 1, 2}
    assert router.assign([4], prompt) is None
    router.closed = set()
    for uid in (0, 2, 3):
        router.release(uid)
    assert {router.assign([uid]) for uid in (5, 6, 7)} == {0, 1, 2}


def test_the_next_turn_of_a_conversation_goes_where_the_last_answer_was_made() -> None:
    router = Router(2, capacity_tokens=1 << 20)
    prompt = list(range(WORTH_TOKENS // 2))
    first = router.assign([0], prompt)
    answer = [7] * WORTH_TOKENS
    router.remember(0, lambda: [*prompt, *answer])
    router.release(0)
    assert router.assign([1], [*prompt, *answer, 1, 2, 3]) == first


def test_old_prefixes_are_forgotten() -> None:
    owners = PrefixOwners(capacity=8)
    for start in range(100):
        owners.add([start] * (4 * BLOCK_TOKENS), 0)
        assert len(owners) <= 8
    assert owners.longest([99] * (4 * BLOCK_TOKENS)) == (0, 4 * BLOCK_TOKENS)
    assert owners.longest([3] * (4 * BLOCK_TOKENS)) == (-1, 0)


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=200))
def test_the_least_loaded_replica_is_found_after_any_history(
    history: list[tuple[int, bool]],
) -> None:
    router, open_uids = Router(5), []
    for uid, (replica, ends) in enumerate(history):
        router.assign([uid], replica=replica)
        open_uids.append(uid)
        if ends:
            router.release(open_uids.pop(0))
    least = min(router.num_open)
    chosen = router.assign([10_000])
    assert chosen is not None
    assert router.num_open[chosen] == least + 1
