"""Rounds: a mixed load, a fault at a random moment, and every client has what it would have had.

A round is named by a seed and a number, and runs the same fault again. Times are measured with
perf_counter, because a fault may move the other clocks.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from paceline.config import EngineConfig
from paceline.engine import supervisor
from paceline.engine.client import EngineClient
from tests.e2e.serving import save_served
from tests.eagle import train
from tests.faults import processors, saboteur
from tests.faults.load import TEXTS, Load
from tests.mtp import random_mtp, save_mtp
from tests.server.processes import is_running
from tests.tiny import greedy_reference

STALL_S = 5.0
RECOVERY_S = 2.0  # most of a recovery beside the stall timeout and the start of the ranks
PATIENCE_S = 150.0
MTP = {"method": "mtp", "num_speculative_tokens": 2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"data_parallel_size": 2, "speculative_config": NGRAM},
    "tp2": {"tensor_parallel_size": 2},
    "dp2-ep": {"data_parallel_size": 2, "enable_expert_parallel": True, "speculative_config": MTP},
}


def save_models(folder: Path) -> None:
    """Once: a dense model, and one with experts and an MTP layer that has learned a little."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as made:
        _save_models(Path(made))
        with contextlib.suppress(OSError):  # another process was faster
            Path(made).rename(folder)


def _save_models(folder: Path) -> None:
    save_served(folder / "dense")
    target = save_served(folder / "plain", "glm4-moe-lite")
    tokenizer = Tokenizer.from_file(str(folder / "plain" / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in TEXTS]
    target.generation_config.eos_token_id = None  # the load goes on past it
    known = [[*prompt, *greedy_reference(target, prompt, 50)] for prompt in prompts]
    head = train(random_mtp(target), target, known, num_steps=25)
    save_mtp(folder / "experts", folder / "plain", head)


# ---- faults


def kill(pid: int, draw: random.Random) -> None:
    os.kill(pid, signal.SIGKILL)


def stop(pid: int, draw: random.Random) -> None:
    os.kill(pid, signal.SIGSTOP)


def hang(pid: int, draw: random.Random) -> None:
    os.kill(pid, saboteur.HANG)


def close_sockets(pid: int, draw: random.Random) -> None:
    os.kill(pid, saboteur.CLOSE_SOCKETS)


def fill_disk(pid: int, draw: random.Random) -> None:
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def slow_down(pid: int, draw: random.Random) -> None:
    os.kill(pid, saboteur.SLOW_DOWN)


def jump_clock(pid: int, draw: random.Random) -> None:
    os.kill(pid, saboteur.JUMP_AHEAD)


FAULTS: dict[str, Callable[[int, random.Random], None]] = {
    "kill": kill,
    "stop": stop,
    "pause": stop,  # and continue after a while
    "hang": hang,
    "close": close_sockets,
    "disk": fill_disk,
    "slow": slow_down,
    "clock": jump_clock,
    "front clock": lambda pid, draw: None,
    "drain": lambda pid, draw: None,
}
# More often: what costs most.
CHOICES = [*FAULTS, "kill", "kill", "stop", "pause", "close"]


@dataclass
class Round:
    """What one round did and found."""

    number: int
    layout: str
    faults: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    num_restarts: int = 0
    recovery_s: float = 0.0  # from the last fault until all replicas serve again
    start_s: float = 0.0  # what the start of the ranks took of it
    seconds: float = 0.0

    @property
    def limit_s(self) -> float:
        """What a recovery may take."""
        return STALL_S + self.start_s + RECOVERY_S

    @property
    def is_late(self) -> bool:
        return self.num_restarts > 0 and self.recovery_s > self.limit_s

    def __str__(self) -> str:
        what = "; ".join(self.complaints) or "ok"
        return (
            f"round {self.number} {self.layout} [{', '.join(self.faults)}] {self.seconds:.1f} s, "
            f"{self.num_restarts} restarts, recovery {self.recovery_s:.1f} s, "
            f"start {self.start_s:.1f} s: {what}"
        )


class Bench:
    """The engines of all layouts, each started when it is first needed and kept for all rounds."""

    def __init__(self, folder: Path) -> None:
        save_models(folder)
        self._folder = folder
        self._clients: dict[str, EngineClient] = {}
        self._undisturbed: dict[str, Load] = {}
        self._pids: set[int] = set()
        self._back_s = 0.0  # when all replicas of a client served again

    def client(self, layout: str) -> EngineClient:
        if layout not in self._clients:
            model = "experts" if layout.endswith("ep") else "dense"
            config = EngineConfig.from_keywords(
                model=str(self._folder / model),
                dtype="float32",
                device="cpu",
                cpu_threads=1,
                max_num_seqs=10,  # fewer than sequences: some wait
                stall_timeout=STALL_S,
                max_restarts=1000,
                logits_processors=(processors.NAME,),
                **LAYOUTS[layout],
            )
            client = EngineClient.start(config, factory=saboteur.FACTORY)
            self._clients[layout] = client
            self._pids |= {*client.engine_pids}
            load = Load(client)
            self._pump(client, lambda: load.is_finished)
            self._undisturbed[layout] = load
        return self._clients[layout]

    def run(
        self,
        seed: int,
        number: int,
        layout: str | None = None,
        *,
        faults: Sequence[str] | None = None,
    ) -> Round:
        """One round; `faults` None: random ones."""
        draw = random.Random(f"{seed}-{number}")
        layout = layout or [*LAYOUTS][number % len(LAYOUTS)]
        client, done = self.client(layout), Round(number, layout)
        groups = client._supervisor._groups
        clusters = [group.cluster for group in groups]
        started_s, before = time.perf_counter(), sum(client.stats.restarts.values())
        if faults is None:
            faults = [draw.choice(CHOICES) for _ in range(draw.choice((1, 1, 1, 2)))]
        moments = [draw.random() for _ in faults]
        load, expected = Load(client), self._undisturbed[layout].num_tokens
        with _clock() as clock:
            for fault, moment in zip(faults, sorted(moments), strict=True):
                self._pump(client, lambda m=moment: load.num_tokens >= m * expected)  # type: ignore[misc]
                self._inflict(client, fault, draw, clock, done)
            hurt_s = time.perf_counter()
            is_over = self._pump(client, lambda: load.is_finished)
            if not is_over:
                done.complaints.append("a hang")
                for generation in load.generations:
                    client.abort(generation.request_id)
            self._pump(client, lambda: not client.stats.num_restarting)
            self._settle(client)
        done.num_restarts = sum(client.stats.restarts.values()) - before
        if done.num_restarts:
            done.recovery_s = max(0.0, self._back_s - hurt_s)
            new = [g.cluster for g, old in zip(groups, clusters, strict=True) if g.cluster != old]
            starts_s = [sum(cluster.info().startup_s.values()) for cluster in new]
            # The front's clock may have jumped while a group started.
            done.start_s = max((s - clock[0] if s > clock[0] else s) for s in starts_s)
        done.seconds = time.perf_counter() - started_s
        if is_over:
            done.complaints += load.complaints(self._undisturbed[layout])
        self._pids |= {*client.engine_pids}
        alive = {pid for c in self._clients.values() for pid in c.engine_pids}
        if left := [pid for pid in self._pids - alive if is_running(pid)]:
            done.complaints.append(f"orphans: {left}")
        return done

    def _inflict(
        self, client: EngineClient, fault: str, draw: random.Random, clock: list[float], done: Round
    ) -> None:
        pids = client.engine_pids
        if not pids:  # all restart
            self._pump(client, lambda: bool(client.engine_pids))
            pids = client.engine_pids
        victim = draw.randrange(len(pids))
        done.faults.append(f"{fault} {victim}")
        if fault == "drain":
            client.drain_rank(victim, grace_s=draw.choice((0.0, 0.3, 10.0)))
            return
        if fault == "front clock":
            clock[0] += 3600.0
            return
        self._pids |= {*pids}
        try:
            FAULTS[fault](pids[victim], draw)
        except ProcessLookupError:
            return
        if fault == "pause":
            for_s, began_s = draw.uniform(0.2, 2 * STALL_S), time.perf_counter()
            self._pump(client, lambda: time.perf_counter() - began_s > for_s)
            if is_running(pids[victim]):
                os.kill(pids[victim], signal.SIGCONT)

    def _settle(self, client: EngineClient) -> None:
        """A frozen rank that had nothing to do is found after the load has finished."""
        frozen = [pid for pid in client.engine_pids if _is_stopped(pid)]
        if frozen:
            num_before = sum(client.stats.restarts.values())
            self._pump(client, lambda: not any(is_running(pid) for pid in frozen))
            self._pump(client, lambda: sum(client.stats.restarts.values()) > num_before)
            self._pump(client, lambda: not client.stats.num_restarting)

    def _pump(self, client: EngineClient, until: Callable[[], bool]) -> bool:
        give_up_s = time.perf_counter() + PATIENCE_S
        while not until():
            if time.perf_counter() > give_up_s:
                return False
            was_restarting = client.stats.num_restarting
            client.pump(0.05)
            if was_restarting and not client.stats.num_restarting:
                self._back_s = time.perf_counter()
        return True

    def close(self) -> list[str]:
        """What is left when every engine was closed."""
        for client in self._clients.values():
            self._pids |= {*client.engine_pids}
            client.close()
        left = [pid for pid in self._pids if is_running(pid)]
        return [f"orphans after the end: {left}"] if left else []


def _is_stopped(pid: int) -> bool:
    try:
        return "State:\tT" in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False


@contextlib.contextmanager
def _clock() -> Iterator[list[float]]:
    """How far the front's clock is ahead; restarts count as recovered at once, so none waits."""
    ahead, real, recovered_s = [0.0], time.monotonic, supervisor._RECOVERED_S
    time.monotonic = lambda: real() + ahead[0]
    supervisor._RECOVERED_S = -1.0
    try:
        yield ahead
    finally:
        time.monotonic, supervisor._RECOVERED_S = real, recovered_s
