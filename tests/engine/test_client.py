"""Requests through the client and an engine in a thread: streams, ends, aborts, failures."""

from __future__ import annotations

import fcntl
import logging
import termios
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from paceline.config import EngineConfig
from paceline.engine.admission import Admission
from paceline.engine.client import EngineClient
from paceline.engine.cluster import _StartClock
from paceline.engine.messages import Events, Gauges, encode_step
from paceline.engine.outputs import Delta
from paceline.engine.transport import Channels
from paceline.errors import (
    EngineDead,
    InvalidRequest,
    PromptTooLong,
)
from paceline.request import Done, EngineRequest, SamplingParams
from paceline.scheduler.events import Ended
from paceline.step import StepResult
from tests.engine.echo_client import (
    EOS,
    FACTORY,
    Stream,
    echo_client,
    echo_front,
    pump_for_ever,
    pump_until,
    pump_until_finished,
    run,
    submit,
)

NGRAM_3 = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def client() -> Iterator[EngineClient]:
    with echo_client() as client:
        yield client


@pytest.fixture(scope="module")
def drafting() -> Iterator[EngineClient]:
    """An engine that emits up to four tokens a step."""
    with echo_client("k=3", speculative_config={**NGRAM_3, "adaptive": False}) as client:
        yield client


def test_a_stream_is_the_text_in_pieces_and_ends_once(client: EngineClient) -> None:
    stream = run(client, "abc ", max_tokens=10)
    assert stream.text() == "abc abc ab"
    assert stream.token_ids() == client.tokenizer.encode("abc abc ab")
    assert [d.finish_reason for d in stream.deltas[:-1]] == [None] * (len(stream.deltas) - 1)
    assert stream.last().finish_reason == "length"
    assert stream.generation is not None
    assert stream.generation.prompt == "abc "


def test_characters_of_several_tokens_come_whole(client: EngineClient) -> None:
    stream = run(client, "héé", max_tokens=9)
    assert stream.text() == "hééhé\ufffd"
    assert all("\ufffd" not in d.text for d in stream.deltas[:-1])


def test_many_requests_do_not_mix(client: EngineClient) -> None:
    prompts = [f"number {i};" for i in range(40)]
    streams = [submit(client, p, p, max_tokens=len(p) * 2) for p in prompts]
    pump_until_finished(client, *streams)
    assert [s.text() for s in streams] == [p * 2 for p in prompts]
    assert client.num_open == 0


def test_n_sequences_share_one_request(client: EngineClient) -> None:
    stream = run(client, "xy", n=3, max_tokens=4)
    assert [stream.text(i) for i in range(3)] == ["xyxy"] * 3
    assert {stream.last(i).finish_reason for i in range(3)} == {"length"}
    assert stream.generation is not None
    # three times one prefill and four tokens
    assert stream.generation.metrics.num_steps == 12


def test_a_request_id_is_free_again_when_its_request_is_finished(client: EngineClient) -> None:
    run(client, "a", max_tokens=1)
    first = submit(client, "one", "a", max_tokens=400)
    with pytest.raises(InvalidRequest, match="in use"):
        submit(client, "one", "a")
    client.abort("one")
    again = submit(client, "one", "a", max_tokens=2)
    pump_until_finished(client, again)
    assert again.text() == "aa"
    assert first.finished


# ---- ends


def test_eos_ends_the_text_before_it_and_is_part_of_the_tokens(client: EngineClient) -> None:
    stream = run(client, "ab<end>", max_tokens=9)
    assert stream.text() == "ab"
    assert stream.token_ids()[-1] == EOS
    assert (stream.last().finish_reason, stream.last().stop_reason) == ("stop", None)


def test_ignore_eos_goes_on(client: EngineClient) -> None:
    stream = run(client, "ab<end>", max_tokens=6, ignore_eos=True)
    assert stream.text() == "abab"
    shown = run(client, "ab<end>", max_tokens=6, ignore_eos=True, skip_special_tokens=False)
    assert shown.text() == "ab<end>ab<end>"
    assert stream.last().finish_reason == "length"


def test_a_stop_token_is_named_and_shown_only_on_request(client: EngineClient) -> None:
    (c,) = client.tokenizer.encode("c")
    stream = run(client, "abcd", max_tokens=9, stop_token_ids=[c])
    assert stream.text() == "ab"
    assert stream.token_ids() == client.tokenizer.encode("abc")
    assert (stream.last().finish_reason, stream.last().stop_reason) == ("stop", c)
    params = {"stop_token_ids": [c], "include_stop_str_in_output": True}
    assert run(client, "abcd", max_tokens=9, **params).text() == "abc"


def test_a_stop_string_cuts_at_the_token_that_completes_it(client: EngineClient) -> None:
    stream = run(client, "one two three ", max_tokens=300, stop=["two"])
    assert stream.text() == "one "
    assert stream.token_ids() == client.tokenizer.encode("one two")
    assert (stream.last().finish_reason, stream.last().stop_reason) == ("stop", "two")
    assert run(client, "one two ", stop="two", include_stop_str_in_output=True).text() == "one two"


def test_a_stop_string_drops_the_later_tokens_of_its_step(drafting: EngineClient) -> None:
    """The window holds four tokens; the string ends within it."""
    for end in range(2, 12):
        word = "abcdefghijkl"[end - 2 : end]
        stream = run(drafting, "abcdefghijkl", max_tokens=50, stop=[word], logprobs=1)
        assert stream.text() == "abcdefghijkl"[: end - 2]
        assert stream.token_ids() == drafting.tokenizer.encode("abcdefghijkl"[:end])
        assert sum(len(d.logprobs or ()) for d in stream.deltas) == end
        assert stream.last().stop_reason == word


def test_a_stop_string_wins_over_a_later_finish_code(drafting: EngineClient) -> None:
    """First token alone, then a window of four: b c d <end>, where the text ends at c."""
    stream = run(drafting, "abcd<end>", max_tokens=50, stop=["c"])
    assert stream.last().stop_reason == "c"
    assert stream.token_ids() == drafting.tokenizer.encode("abc")
    limited = run(drafting, "abcdefg", max_tokens=5, stop=["c"])
    assert (limited.last().finish_reason, limited.last().stop_reason) == ("stop", "c")


def test_min_tokens_holds_for_stop_strings_too(client: EngineClient) -> None:
    stream = run(client, "ab", max_tokens=50, min_tokens=6, stop=["b"])
    assert stream.text() == "ababa"


def test_a_stop_string_ends_the_request_in_the_engine_as_well() -> None:
    with echo_client("delay_s=0.02") as client:
        run(client, "one two ", max_tokens=500, stop=["two"])
        while client.stats.num_running:
            client.pump(1.0)
        # ten seconds' worth of steps if the engine had not been told
        assert client.stats.num_steps < 100
        assert client.stats.finished == {"stop": 1}


# ---- logprobs and metrics


def test_logprobs_name_the_token_and_the_most_likely_ones(client: EngineClient) -> None:
    stream = run(client, "ab", max_tokens=2, logprobs=3)
    tables = [table for d in stream.deltas for table in d.logprobs or ()]
    a = client.tokenizer.encode("a")[0]
    assert [list(t) for t in tables] == [[a, a + 1, a + 2], [a + 1, a + 2, a + 3]]
    assert [v.rank for v in tables[0].values()] == [2, 1, 3]
    assert [v.decoded_token for v in tables[0].values()] == ["a", "b", "c"]
    assert [v.logprob for v in tables[0].values()] == [-1.5, -0.5, -2.5]
    chosen_only = run(client, "ab", max_tokens=2, logprobs=0)
    assert [len(t) for d in chosen_only.deltas for t in d.logprobs or ()] == [1, 1]
    assert run(client, "ab", max_tokens=2).last().logprobs is None


def test_prompt_logprobs_come_once_with_the_first_token() -> None:
    # a prompt of three chunks
    with echo_client(max_num_batched_tokens=16, max_num_seqs=8) as client:
        stream = run(client, "0123456789" * 4, n=2, max_tokens=2, prompt_logprobs=1)
    given = [d.prompt_logprobs for d in stream.deltas if d.prompt_logprobs is not None]
    assert len(given) == 1
    assert stream.of(0)[0].prompt_logprobs is given[0]
    assert given[0][0] is None
    prompt = stream.generation.prompt_token_ids if stream.generation else []
    assert len(given[0]) == len(prompt)
    for token, table in list(zip(prompt, given[0], strict=True))[1:]:
        assert table is not None
        assert next(iter(table)) == token


def test_metrics_tell_times_steps_and_drafts(drafting: EngineClient) -> None:
    before = time.monotonic()
    stream = run(drafting, "abcdefgh", max_tokens=9)
    assert stream.generation is not None
    metrics = stream.generation.metrics
    assert metrics.first_token_time is not None
    assert metrics.finished_time is not None
    assert before <= metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time
    # the prefill emits one, two windows of four the rest
    assert metrics.num_steps == 3
    assert (metrics.num_draft_tokens, metrics.num_accepted_tokens) == (6, 6)


def test_the_drafts_of_each_step_are_collected_on_request(drafting: EngineClient) -> None:
    stream = submit(drafting, "one", "abcdefgh", max_tokens=9)
    assert stream.generation is not None
    metrics = stream.generation.metrics
    metrics.spec_steps = []
    pump_until_finished(drafting, stream)
    assert metrics.spec_steps == [(3, 3), (3, 3)]


def test_a_prefix_hit_is_counted(client: EngineClient) -> None:
    prompt = "a long prefix that fills a page, and more of it"
    run(client, prompt, max_tokens=2)
    stream = run(client, prompt, max_tokens=2)
    assert stream.generation is not None
    assert stream.generation.metrics.num_cached_tokens >= 32


def test_stats_add_up(drafting: EngineClient) -> None:
    stats = drafting.stats
    before = (stats.num_generated_tokens, stats.num_prompt_tokens, stats.num_accepted_tokens)
    run(drafting, "abcdefgh", max_tokens=9)
    assert stats.num_generated_tokens == before[0] + 9
    assert stats.num_prompt_tokens == before[1] + 8
    assert stats.num_accepted_tokens > before[2]
    assert sum(stats.accepted_per_position) == stats.num_accepted_tokens
    assert stats.accepted_per_position == sorted(stats.accepted_per_position, reverse=True)
    assert stats.busy_s > 0


# ---- aborts, sinks and strangers


def test_an_aborted_request_is_not_heard_of_again(client: EngineClient) -> None:
    stream = submit(client, "gone", "abc", max_tokens=500)
    while not stream.deltas:
        client.pump(0.2)
    client.abort("gone")
    seen = len(stream.deltas)
    assert stream.finished
    other = run(client, "abc", max_tokens=3)  # the engine's late rows come meanwhile
    assert other.text() == "abc"
    assert len(stream.deltas) == seen
    client.abort("gone")
    client.abort("never was")


def test_an_aborted_request_keeps_its_places_until_the_engine_has_let_go() -> None:
    with echo_client("delay_s=0.02") as client:
        stream = submit(client, "gone", "abc", n=3, max_tokens=500)
        while not stream.deltas:
            client.pump(1.0)
        client.abort("gone")
        assert (client.num_open, client.num_leaving, client.requests.router.num_held) == (0, 3, 3)
        pump_until_let_go(client)
        assert client.requests.router.num_held == 0


def test_the_engine_lets_go_also_of_a_request_that_it_has_finished() -> None:
    with echo_client() as client:
        submit(client, "over", "abc", max_tokens=3)
        wait_until_nothing_more_arrives(client)  # its last token is on the way
        client.abort("over")
        assert client.num_leaving == 1
        pump_until_let_go(client)


def test_a_stop_string_takes_no_place_after_its_request_has_finished() -> None:
    with echo_client("delay_s=0.02") as client:
        run(client, "one two ", max_tokens=500, stop=["two"])
        assert (client.num_leaving, client.requests.router.num_held) == (0, 0)


def pump_until_let_go(client: EngineClient) -> None:
    pump_until(client, lambda: not client.num_leaving)


def test_sequences_wait_that_the_engine_has_not_heard_of_yet(client: EngineClient) -> None:
    while client.stats.num_running:
        client.pump(1.0)
    streams = [submit(client, str(i), "abc", max_tokens=3) for i in range(5)]
    assert (client.stats.num_running, client.stats.num_waiting) == (0, 5)
    pump_until_finished(client, *streams)
    assert client.stats.num_waiting == 0


def test_a_message_about_an_unknown_request_is_ignored(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Events([(10**9, 4)], [10**9], [Ended(10**9, Done.ABORT)])
    stranger = encode_step(StepResult.without_rows(1), events, Gauges())
    with monkeypatch.context() as patch:
        patch.setattr(Channels, "receive", lambda self, timeout_s: [(0, stranger)])
        assert client.pump(0.0) == 0
    assert run(client, "ab", max_tokens=2).text() == "ab"


def test_a_sink_may_abort_and_submit() -> None:
    with echo_client("delay_s=0.01") as client:
        abort_and_submit(client)


def abort_and_submit(client: EngineClient) -> None:
    follow_up = Stream()
    ids = client.tokenizer.encode("z")

    def on_deltas(deltas: list[Delta]) -> None:
        client.abort("victim")
        if deltas[-1].finish_reason:
            params = SamplingParams(max_tokens=2)
            follow_up.generation = client.submit("next", ids, params, on_deltas=follow_up)

    client.submit("first", ids, SamplingParams(max_tokens=2), on_deltas=on_deltas)
    victim = submit(client, "victim", "abc", max_tokens=400)
    time.sleep(0.3)  # so that one pump has news of both, on most machines
    pump_until(client, lambda: follow_up.finished)
    assert follow_up.text() == "zz"
    assert victim.finished
    assert victim.deltas == []


def test_a_slow_sink_does_not_stall_the_engine() -> None:
    """While a sink holds the front up, the engine finishes; the rest is there at once."""
    with echo_client("delay_s=0.005") as client:
        ids = client.tokenizer.encode("abcdefgh")
        seen: list[Delta] = []

        def slow(deltas: list[Delta]) -> None:
            if not seen:
                wait_until_nothing_more_arrives(client)
            seen.extend(deltas)

        generation = client.submit("slow", ids, SamplingParams(max_tokens=60), on_deltas=slow)
        while not seen:
            client.pump(1.0)
        assert not generation.finished
        client.pump(0.0)
        assert generation.finished
        assert sum(len(delta.token_ids) for delta in seen) == 60


def wait_until_nothing_more_arrives(client: EngineClient) -> None:
    fd, waiting = client._supervisor._groups[0].cluster._ranks[0].channel.fileno(), array("i", [0])
    seen = [-1]
    while len(seen) < 10 or len(set(seen[-10:])) > 1:
        time.sleep(0.1)
        fcntl.ioctl(fd, termios.FIONREAD, waiting)
        seen.append(waiting[0])


def test_without_detokenize_there_are_tokens_and_no_text(client: EngineClient) -> None:
    stream = run(client, "abc", max_tokens=4, detokenize=False, logprobs=1)
    assert stream.text() == ""
    assert len(stream.token_ids()) == 4
    table = (stream.last().logprobs or [])[0]
    assert all(entry.decoded_token is None for entry in table.values())


# ---- the engine's end


def test_a_request_that_the_engine_refuses_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {**NGRAM_3, "adaptive": False}
    with echo_client("pages=3 k=3", speculative_config=spec) as client:
        params = SamplingParams(max_tokens=2)
        with pytest.raises(PromptTooLong):
            client.check([1] * 46, params)
        assert len(run(client, "x" * 45, max_tokens=2).token_ids()) == 1
        # The engine has the same limit and the last word.
        template = client.check([1], params)

        def unchecked(self: Admission, ids: Sequence[int], params: SamplingParams) -> EngineRequest:
            return replace(template, prompt_token_ids=ids)

        monkeypatch.setattr(Admission, "check", unchecked)
        stream = submit(client, "big", "x" * 46, max_tokens=2)
        pump_until_finished(client, stream)
        assert stream.last().finish_reason == "error"
        assert stream.generation is not None
        assert isinstance(stream.generation.error, PromptTooLong)
        assert "46 tokens" in str(stream.generation.error)
        monkeypatch.undo()
        assert run(client, "x" * 20, max_tokens=2).text() == "xx"


def test_a_device_that_fails_ends_every_request_and_then_the_client() -> None:
    with echo_client("fail_at=4") as client:
        with client.together():  # the engine must not fail before it has both
            streams = [submit(client, str(i), "abc", max_tokens=100, n=2) for i in range(2)]
        with pytest.raises(EngineDead, match="caught fire"):
            pump_for_ever(client)
        for stream in streams:
            assert [stream.last(i).finish_reason for i in range(2)] == ["error", "error"]
            assert stream.generation is not None
            assert isinstance(stream.generation.error, EngineDead)
        with pytest.raises(EngineDead):
            submit(client, "later", "abc")
        with pytest.raises(EngineDead):
            client.pump(0.0)
        assert not client.is_alive


def test_a_drained_engine_finishes_what_it_has_and_takes_no_more() -> None:
    with echo_client() as client:
        stream = submit(client, "last", "abc", max_tokens=30)
        client.drain()
        with pytest.raises(EngineDead, match="shutting down"):
            submit(client, "late", "abc")
        while client.num_open:
            client.pump(1.0)
        assert stream.text() == "abc" * 10
        assert stream.last().finish_reason == "length"
        with pytest.raises(EngineDead, match="as it was asked"):
            pump_for_ever(client)


def test_a_closed_client_says_so() -> None:
    with echo_client() as client:
        client.close()
        client.close()
        with pytest.raises(EngineDead, match="closed"):
            submit(client, "late", "abc")


def test_the_prefix_cache_can_be_reset(client: EngineClient) -> None:
    prompt = "another long prefix that fills a page, and more of it"
    run(client, prompt, max_tokens=2)
    client.reset_prefix_cache()
    stream = run(client, prompt, max_tokens=2)
    assert stream.generation is not None
    assert stream.generation.metrics.num_cached_tokens == 0


def test_progress_is_reported_while_loading() -> None:
    seen: list[tuple[str, float]] = []
    client = EngineClient.start(
        EngineConfig.from_keywords(model=""),
        in_process=True,
        factory=FACTORY,
        front=echo_front(),
        progress=lambda stage, fraction: seen.append((stage, fraction)),
    )
    client.close()
    assert seen == [("loading", 0.0), ("loading", 1.0)]


def test_the_front_knows_how_long_each_stage_of_the_start_took(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "paceline"), echo_client() as client:
        startup_s = client.info.startup_s
    assert list(startup_s) == ["process and imports", "loading"]
    assert f"loading {startup_s['loading']:.1f}" in caplog.text


def test_each_stage_of_the_start_has_the_time_until_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    clock = _StartClock()
    for stage, after_s in (("loading", 3.0), ("compiling", 20.5), ("loading", 4.0)):
        now_s += after_s
        clock.enter(stage)
    now_s += 0.25
    wanted = {"process and imports": 3.0, "loading": 20.75, "compiling": 4.0}
    assert clock.stop() == wanted
