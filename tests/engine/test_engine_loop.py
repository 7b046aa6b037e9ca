"""The loop at every depth: aborts, preemption, reuse of slots, late rows, failure, the bubble."""

from __future__ import annotations

import threading
import tracemalloc
from queue import SimpleQueue

import pytest

from paceline.engine.engine import Engine, run_engine
from paceline.engine.messages import (
    Drain,
    Message,
    ResetPrefixCache,
    StepMessage,
    Stop,
    Stopped,
    decode,
    encode,
    encode_abort,
    encode_submit,
)
from paceline.errors import EngineDead
from paceline.request import Done, EngineRequest
from paceline.step import Ints, LateMasks, RunnerInfo, SlotInit, StepPlan, StepResult
from tests.engine.harness import Harness, ModThree, engine_config, request
from tests.fakes import FakeRunner, FakeStep, runner_info

DEPTHS = range(4)
all_depths = pytest.mark.parametrize("depth", DEPTHS)


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + i) % 60 for i in range(length)]


def plans(harness: Harness) -> list[StepPlan]:
    return harness.runner.plans


# ---- depth


@all_depths
def test_the_loop_runs_ahead_by_its_depth_and_no_further(depth: int) -> None:
    harness = Harness(runner_info(), depth=depth)
    harness.add(request(1, prompt(5), max_tokens=20))
    harness.run()
    assert harness.max_in_flight == depth
    harness.check_outputs()


@all_depths
def test_one_message_is_published_per_step(depth: int) -> None:
    harness = Harness(runner_info(max_k=2), depth=depth)
    harness.add(request(1, prompt(5), max_tokens=20))
    harness.run()
    # The admission is known before there is a result to send it with.
    assert harness.front.num_messages == len(plans(harness)) + 1


@all_depths
def test_the_reference_equals_a_run_without_speculation(depth: int) -> None:
    """Ties the tests' oracle to the engine: the plainest run there is gives the same tokens."""
    harness = Harness(runner_info(num_slots=1, max_k=0), depth=depth, enable_prefix_caching=False)
    for uid in range(1, 6):
        harness.add(request(uid, prompt(3 * uid), eos=(3, 4, 5), max_tokens=30, seed=uid))
    harness.run()
    harness.check_outputs()
    assert {stream.done for stream in harness.front.streams.values()} == {Done.EOS, Done.LENGTH}


def test_an_idle_engine_says_so_and_wakes_up_again() -> None:
    harness = Harness(runner_info(), depth=1)
    assert not harness.turn()
    for uid in (1, 2):
        harness.add(request(uid, prompt(5)))
        harness.run()
        assert not harness.turn()
    harness.check_outputs()


@pytest.mark.trap("A2")
@all_depths
def test_rows_keep_their_tokens_when_the_first_row_ends(depth: int) -> None:
    harness = Harness(runner_info(max_k=3, num_slots=4), depth=depth)
    for uid, max_tokens in ((1, 3), (2, 20), (3, 20), (4, 20)):
        harness.add(request(uid, prompt(6, 7 * uid), max_tokens=max_tokens))
    harness.run()
    harness.check_outputs()


@pytest.mark.trap("A5")
@all_depths
def test_a_slot_is_reused_at_once_and_late_rows_of_its_former_owner_do_not_leak(
    depth: int,
) -> None:
    harness = Harness(runner_info(num_slots=1, max_k=2, page_size=4), depth=depth)
    everything = tuple(range(40))  # the first sampled token ends most of these requests
    for uid in range(1, 9):
        harness.add(request(uid, prompt(13), eos=everything if uid % 2 else (), seed=uid))
    harness.run()
    harness.check_outputs()
    slots = {init.slot for plan in plans(harness) for init in plan.admissions}
    assert slots == {0}
    hits = [stream.num_cached for stream in harness.front.streams.values()]
    assert hits == [[0]] + [[12]] * 7
    if depth:
        assert harness.front.num_wasted_rows > 0


# ---- aborts


@all_depths
@pytest.mark.parametrize("after", range(6))
def test_an_abort_at_any_moment_ends_the_stream_and_frees_all(depth: int, after: int) -> None:
    """Waiting, between chunks, in flight, decoding: by how many turns came before."""
    harness = Harness(runner_info(max_k=2), depth=depth, max_num_batched_tokens=12)
    stream = harness.add(request(1, prompt(20), max_tokens=30))
    other = harness.add(request(2, prompt(20, 9), max_tokens=10))
    for _ in range(after):
        harness.turn()
    harness.engine.abort(1)
    harness.engine.abort(1)
    harness.engine.abort(77)
    harness.run()
    harness.check_outputs()
    assert stream.done == Done.ABORT
    assert other.done == Done.LENGTH


@all_depths
def test_rows_in_flight_of_an_aborted_request_are_counted_as_wasted(depth: int) -> None:
    harness = Harness(runner_info(), depth=depth)
    harness.add(request(1, prompt(5), max_tokens=30))
    for _ in range(5):
        harness.turn()
    assert harness.num_in_flight == depth
    harness.engine.abort(1)
    harness.run()
    assert harness.front.num_wasted_rows == depth
    assert harness.engine.stats()["num_wasted_rows"] == depth


@all_depths
def test_a_preempted_request_can_be_aborted_before_it_has_drained(depth: int) -> None:
    harness = Harness(runner_info(max_k=2), depth=depth)
    stream = harness.add(request(1, prompt(5), max_tokens=30))
    for _ in range(4):
        harness.turn()
    harness.engine.reset_prefix_cache(preempt_running=True)
    harness.engine.abort(1)
    harness.run()
    harness.check_outputs()
    assert stream.done == Done.ABORT
    assert harness.front.num_wasted_rows == depth


# ---- preemption and cache resets


@pytest.mark.trap("B2")
@all_depths
def test_preemption_after_every_step_changes_no_token(depth: int) -> None:
    harness = Harness(runner_info(max_k=4), depth=depth)
    for uid in (1, 2, 3):
        harness.add(request(uid, prompt(7, uid), max_tokens=15))
    while harness.turn():
        harness.engine.reset_prefix_cache(preempt_running=True)
    harness.check_idle()
    harness.check_outputs()
    assert harness.num_preemptions > 10


@pytest.mark.trap("B1")
@pytest.mark.parametrize("preempt_running", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_cache_reset_while_a_verification_is_in_flight(depth: int, preempt_running: bool) -> None:
    harness = Harness(runner_info(max_k=4, page_size=4), depth=depth)
    for uid in (1, 2):
        harness.add(request(uid, prompt(9), max_tokens=20))
    for _ in range(4):
        harness.turn()
    assert plans(harness)[-1].k_B.max() == 4
    assert harness.num_in_flight == depth
    harness.engine.reset_prefix_cache(preempt_running=preempt_running)
    harness.run()
    harness.check_outputs()


@pytest.mark.trap("B3")
@pytest.mark.parametrize("preempt_running", [False, True])
@all_depths
def test_a_cache_reset_while_idle_loses_and_repeats_no_token(
    depth: int, preempt_running: bool
) -> None:
    harness = Harness(runner_info(max_k=2), depth=depth)
    harness.add(request(1, prompt(9)))
    harness.run()
    harness.engine.reset_prefix_cache(preempt_running=preempt_running)
    second = harness.add(request(2, prompt(9)))
    harness.run()
    harness.check_outputs()
    assert second.num_cached == [0]


@pytest.mark.trap("B5")
@all_depths
def test_a_resumed_request_computes_prompt_and_output_in_chunks(depth: int) -> None:
    harness = Harness(
        runner_info(max_k=1), depth=depth, max_num_batched_tokens=8, enable_prefix_caching=False
    )
    stream = harness.add(request(1, prompt(10), max_tokens=20))
    while len(stream.tokens) < 8:
        harness.turn()
    harness.engine.reset_prefix_cache(preempt_running=True)
    while not any(init.num_cached == 0 and len(init.tokens) > 10 for init in admissions(harness)):
        harness.turn()
    resumed = admissions(harness)[-1]
    assert resumed.prompt_len == 10
    assert resumed.tokens.tolist() == prompt(10) + stream.tokens
    first = len(plans(harness)) - 1
    assert plans(harness)[first].admissions == [resumed]
    harness.run()
    chunks = [plan.query_len_B.tolist() for plan in plans(harness)[first : first + 3]]
    assert chunks == [[8], [8], [len(resumed.tokens) - 16]]
    harness.check_outputs()


def admissions(harness: Harness) -> list[SlotInit]:
    return [init for plan in plans(harness) for init in plan.admissions]


@all_depths
def test_output_that_arrives_after_a_preemption_can_end_the_request(depth: int) -> None:
    harness = Harness(runner_info(), depth=depth)
    stream = harness.add(request(1, prompt(5), max_tokens=depth + 2))
    harness.turn()
    while harness.num_in_flight < depth or not stream.num_cached:
        harness.turn()
    while len(plans(harness)) < depth + 2:
        harness.turn()
    harness.engine.reset_prefix_cache(preempt_running=True)
    harness.run()
    harness.check_outputs()
    assert len(plans(harness)) == depth + 2, "it was finished, not resumed"


@pytest.mark.trap("B6")
@pytest.mark.parametrize("depth", [0, 2])
def test_priority_preemption_leaves_nothing_of_the_victim_in_the_step(depth: int) -> None:
    """The runner refuses pages and drafts of slots that have no row in the step."""
    info = runner_info(num_pages=20, page_size=1, num_slots=4, max_model_len=18, max_k=2)
    harness = Harness(info, depth=depth, scheduling_policy="priority")
    for uid in range(1, 21):
        harness.add(request(uid, prompt(3, uid), max_tokens=9, priority=-uid))
        harness.turn()
    harness.run()
    harness.check_outputs()
    assert harness.num_preemptions > 5


@pytest.mark.trap("B9")
@all_depths
def test_a_resumed_request_starts_without_drafts(depth: int) -> None:
    harness = Harness(runner_info(max_k=4), depth=depth)
    harness.runner.no_draft = 0.0
    harness.add(request(1, prompt(5), max_tokens=30))
    for _ in range(4):
        harness.turn()
    num_before = len(plans(harness))
    harness.engine.reset_prefix_cache(preempt_running=True)
    harness.run()
    resumed = plans(harness)[num_before]
    assert [init.request.uid for init in resumed.admissions] == [1]
    assert resumed.k_B.tolist() == [0]
    harness.check_outputs()


@pytest.mark.trap("B12")
@all_depths
def test_slots_are_free_for_new_arrivals_after_everybody_was_preempted(depth: int) -> None:
    harness = Harness(runner_info(num_slots=4, max_k=2), depth=depth, scheduling_policy="priority")
    for uid in range(1, 5):
        harness.add(request(uid, prompt(5, uid), priority=5))
    for _ in range(3):
        harness.turn()
    harness.engine.reset_prefix_cache(preempt_running=True)
    for uid in range(5, 9):
        harness.add(request(uid, prompt(5, uid), priority=0))
    harness.turn()
    assert plans(harness)[-1].uid_B.tolist() == [5, 6, 7, 8]
    harness.run()
    harness.check_outputs()


# ---- late rows


@pytest.mark.parametrize("max_k", [0, 1, 3])
@all_depths
def test_a_constrained_request_obeys_its_grammar_beside_free_ones(depth: int, max_k: int) -> None:
    harness = Harness(runner_info(max_k=max_k), depth=depth)
    grammar = ModThree(64)
    stream = harness.add(request(1, prompt(9), max_tokens=20), grammar)
    harness.add(request(2, prompt(9, 5), max_tokens=35))
    harness.run()
    harness.check_outputs()
    assert grammar.accepted == stream.tokens
    late = [plan.late_B for plan in plans(harness)]
    assert late[0] is not None
    assert late[-1] is None, "the steps after it are plain again"


@all_depths
def test_steps_with_late_rows_run_at_most_one_ahead(depth: int) -> None:
    harness = Harness(runner_info(max_k=2), depth=depth)
    harness.add(request(1, prompt(9), max_tokens=40))
    while harness.num_in_flight < depth:
        harness.turn()
    harness.add(request(2, prompt(9, 5), max_tokens=6), ModThree(64))
    while not harness.front.streams[2].done:
        harness.turn()
        if plans(harness)[-1].late_B is not None:
            assert harness.num_in_flight <= min(depth, 1)
    harness.run()
    harness.check_outputs()
    assert harness.max_in_flight == depth


def test_accepted_drafts_of_a_constrained_request_pass_its_masks() -> None:
    harness = Harness(runner_info(max_k=3), depth=1, seed=1)
    harness.runner.no_draft = 0.0
    streams = [
        harness.add(request(uid, prompt(9, uid), max_tokens=60), ModThree(64)) for uid in (1, 2, 3)
    ]
    harness.run()
    harness.check_outputs()
    assert sum(stream.num_accepted for stream in streams) > 5


@pytest.mark.trap("B8")
@all_depths
def test_a_preempted_constrained_request_keeps_no_drafts(depth: int) -> None:
    class Recording(ModThree):
        def __init__(self) -> None:
            super().__init__(64)
            self.asked: list[list[int]] = []

        def masks(self, draft_ids: list[int]) -> Ints:
            self.asked.append(draft_ids)
            return super().masks(draft_ids)

    harness = Harness(runner_info(max_k=3), depth=depth)
    harness.runner.no_draft = 0.0
    grammar = Recording()
    harness.add(request(1, prompt(9), max_tokens=25), grammar)
    for _ in range(5):
        harness.turn()
    assert grammar.asked[-1] != []
    harness.engine.reset_prefix_cache(preempt_running=True)
    num_before = len(grammar.asked)
    harness.run()
    assert grammar.asked[num_before] == []
    harness.check_outputs()


# ---- failure


@all_depths
@pytest.mark.parametrize("fail_at", [1, 4])
def test_a_failing_device_answers_everybody_and_stops_the_engine(depth: int, fail_at: int) -> None:
    harness = Harness(runner_info(num_slots=2), depth=depth)
    harness.runner.fail_at = fail_at
    for uid in (1, 2, 3):
        harness.add(request(uid, prompt(5, uid), max_tokens=20))
    with pytest.raises(EngineDead, match="RuntimeError: the device is on fire"):
        harness.run()
    for stream in harness.front.streams.values():
        assert stream.done == Done.ERROR
        assert "on fire" in stream.reason
    with pytest.raises(EngineDead, match="on fire"):
        harness.engine.add(request(4, prompt(5)))
    with pytest.raises(EngineDead, match="on fire"):
        harness.engine.turn()


def test_a_device_that_cannot_launch_answers_everybody_too() -> None:
    class Broken(FakeRunner):
        def launch(self, plan: StepPlan) -> FakeStep:
            raise MemoryError("no room for the step")

    info = runner_info()
    harness = Harness(info, runner=Broken(info))
    stream = harness.add(request(1, prompt(5)))
    with pytest.raises(EngineDead, match="MemoryError: no room for the step"):
        harness.turn()
    assert stream.done == Done.ERROR


# ---- measures


class Scripted:
    """A runner whose device times are given; every row emits one token and never ends."""

    def __init__(self, times: list[tuple[float, float]]) -> None:
        self._times = iter(times)
        self._runner = FakeRunner(runner_info())

    @property
    def info(self) -> RunnerInfo:
        return self._runner.info

    def launch(self, plan: StepPlan) -> ScriptedStep:
        return ScriptedStep(self._runner.launch(plan), *next(self._times))

    def close(self) -> None:
        pass


class ScriptedStep:
    def __init__(self, step: FakeStep, start_s: float, end_s: float) -> None:
        self._step, self._start_s, self._end_s = step, start_s, end_s

    def bind(self, late: LateMasks) -> None:
        raise AssertionError("no late rows here")

    def wait(self) -> StepResult:
        result = self._step.wait()
        result.device_start_s, result.device_end_s = self._start_s, self._end_s
        return result


def test_the_bubble_is_idle_time_between_steps_but_not_while_there_is_no_work() -> None:
    times = [(1.0, 2.0), (2.0, 3.0), (3.5, 4.0), (10.0, 11.0), (11.25, 12.0)]
    engine_info = runner_info()
    total = 0.0

    def publish(data: bytes) -> None:
        nonlocal total
        message = decode(data)
        assert isinstance(message, StepMessage)
        total += message.gauges.bubble_s

    engine = Engine(Scripted(times), engine_config(engine_info, depth=1), publish)
    engine.add(request(1, prompt(5), max_tokens=3))
    while engine.turn():
        pass
    engine.add(request(2, prompt(5), max_tokens=2))
    while engine.turn():
        pass
    assert engine.stats()["bubble_s"] == pytest.approx(0.75)
    assert total == pytest.approx(0.75)
    assert engine.stats()["busy_s"] == pytest.approx(4.25)


def test_gauges_follow_the_queue_and_the_pages() -> None:
    harness = Harness(runner_info(num_slots=2, num_pages=64, page_size=4))
    for uid in (1, 2, 3):
        harness.add(request(uid, prompt(8, uid), max_tokens=4))
    harness.turn()
    harness.turn()
    assert harness.front.last is not None
    gauges = harness.front.last.gauges
    assert (gauges.num_running, gauges.num_waiting) == (2, 1)
    assert 0.0 < gauges.kv_usage < 1.0
    harness.run()
    gauges = harness.front.last.gauges
    assert (gauges.num_running, gauges.num_waiting, gauges.kv_usage) == (0, 0, 0.0)
    assert gauges.step == len(plans(harness))


def test_every_stage_can_be_delayed() -> None:
    stages: list[str] = []
    harness = Harness(runner_info(), delay=stages.append)
    harness.add(request(1, prompt(5)), ModThree(64))
    harness.run()
    assert set(stages) == {"plan", "launch", "bind", "publish", "wait", "commit"}


@pytest.mark.trap("B15")
def test_memory_stays_flat_over_many_steps() -> None:
    info = runner_info(num_slots=4, max_k=2, page_size=4)
    runner = FakeRunner(info)
    runner.keeps_plans = False
    engine = Engine(runner, engine_config(info, depth=1), lambda data: None)
    uid = 0

    def run(steps: int) -> int:
        nonlocal uid
        for _ in range(steps):
            while engine.num_unfinished < 6:
                uid += 1
                engine.add(request(uid, prompt(7, uid), max_tokens=20, seed=uid))
            engine.turn()
        return tracemalloc.get_traced_memory()[0]

    run(500)
    tracemalloc.start()
    try:
        first = run(500)
        second = run(1500)
    finally:
        tracemalloc.stop()
    assert second - first < 16_384, f"{second - first} bytes more after 1500 steps"


# ---- the process's loop


def served(*inbound: bytes, info: RunnerInfo | None = None) -> list[Message]:
    """What run_engine publishes for an inbox that was full from the start."""
    info = info or runner_info()
    inbox: SimpleQueue[bytes | None] = SimpleQueue()
    for data in inbound:
        inbox.put(data)
    out: list[Message] = []
    engine = Engine(FakeRunner(info), engine_config(info), lambda data: out.append(decode(data)))
    run_engine(engine, inbox)
    return out


def ends(messages: list[Message]) -> dict[int, Done]:
    found = {}
    for message in messages:
        if isinstance(message, StepMessage):
            for uid, done in zip(message.uid_B.tolist(), message.done_B.tolist(), strict=True):
                if done:
                    found[uid] = Done(done)
            found |= {ended.uid: Done(ended.done) for ended in message.events.ended}
    return found


def submit(req: EngineRequest) -> bytes:
    return encode_submit(req)


def test_drain_finishes_what_was_submitted_and_then_stops() -> None:
    messages = served(submit(request(1, prompt(5))), submit(request(2, prompt(6))), encode(Drain()))
    assert ends(messages) == {1: Done.LENGTH, 2: Done.LENGTH}
    assert messages[-1] == Stopped()


def test_stop_drops_what_runs() -> None:
    messages = served(submit(request(1, prompt(5))), encode(Stop()))
    assert messages == [Stopped()]


def test_a_request_that_cannot_run_is_answered_with_the_reason() -> None:
    messages = served(submit(request(1, prompt(500))), encode(Drain()))
    ended = [e for m in messages if isinstance(m, StepMessage) for e in m.events.ended]
    assert [(e.uid, e.done, e.error) for e in ended] == [(1, Done.ERROR, "PromptTooLong")]
    assert "500 tokens" in ended[0].reason


def test_aborts_and_resets_arrive_through_the_inbox() -> None:
    messages = served(
        submit(request(1, prompt(5))),
        submit(request(2, prompt(5))),
        encode_abort([2]),
        encode(ResetPrefixCache()),
        encode(Drain()),
    )
    assert ends(messages) == {1: Done.LENGTH, 2: Done.ABORT}


def test_an_idle_engine_waits_for_its_inbox_and_stops_when_the_front_is_gone() -> None:
    info = runner_info()
    inbox: SimpleQueue[bytes | None] = SimpleQueue()
    out: SimpleQueue[Message] = SimpleQueue()
    engine = Engine(FakeRunner(info), engine_config(info), lambda data: out.put(decode(data)))
    thread = threading.Thread(target=run_engine, args=(engine, inbox))
    thread.start()
    for uid in (1, 2):
        inbox.put(submit(request(uid, prompt(5), max_tokens=1)))
        found: dict[int, Done] = {}
        while uid not in found:
            found |= ends([out.get(timeout=20)])
    inbox.put(None)
    thread.join(timeout=20)
    assert not thread.is_alive()
