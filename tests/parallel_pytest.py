"""pytest in several processes that take tests from one queue, where no plugin is installed.

The parent holds the queue. A worker collects all tests, then runs those that it is sent, one line
of its standard input each; it is sent one test ahead, because pytest must know the next test to
keep the fixtures that both use. A worker that dies, hangs or meets a CUDA error is replaced.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_RESTARTS = 10
START_S = 120.0  # to import and to collect, beside the time of the first test
PROGRESS_S = 20.0
AHEAD = 2  # the test that runs, and the next
POISON = "CUDA error"  # every later CUDA call of such a process fails too
Event = dict[str, Any]


@dataclass(frozen=True)
class Done:
    """How one test ended."""

    test: str
    outcome: str  # passed, failed or skipped
    seconds: float
    text: str = ""


# ---- a worker


class Worker:
    """The plugin of a worker's pytest."""

    def __init__(self, events_fd: int) -> None:
        os.set_inheritable(events_fd, False)
        self._events = os.fdopen(events_fd, "w", encoding="utf-8")
        self._tests = os.fdopen(os.dup(0), encoding="utf-8")  # pytest puts its own file there
        self._outcome, self._text = "passed", ""

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._say(broken=report.nodeid, text=report.longreprtext)

    def pytest_runtestloop(self, session: Any) -> bool:
        items = {item.nodeid: item for item in session.items}
        self._say(collected=list(items))
        test = self._next()
        while test:
            upcoming = self._next()
            self._outcome, self._text = "passed", ""
            began_s = time.perf_counter()
            session.config.hook.pytest_runtest_protocol(
                item=items[test], nextitem=items[upcoming] if upcoming else None
            )
            seconds = round(time.perf_counter() - began_s, 3)
            self._say(test=test, outcome=self._outcome, seconds=seconds, text=self._text)
            test = upcoming
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._outcome = "failed"
            self._text += f"{report.longreprtext}\n{report.capstdout}{report.capstderr}"
        elif report.skipped and self._outcome == "passed":
            self._outcome = "skipped"

    def _next(self) -> str:
        """ "" when there is none."""
        return self._tests.readline().rstrip("\n")

    def _say(self, **event: Any) -> None:
        self._events.write(json.dumps(event) + "\n")
        self._events.flush()


def work(events_fd: int, arguments: Sequence[str]) -> int:
    import pytest

    worker = Worker(events_fd)
    code = pytest.main([*arguments, "--continue-on-collection-errors"], plugins=[worker])
    return 0 if code in (0, 1, 5) else int(code)  # 1: tests failed, 5: none was collected


# ---- the parent


class Job:
    """A worker as its parent sees it."""

    def __init__(self, number: int, run: ParallelRun) -> None:
        reading, writing = os.pipe()
        self.number = number
        self.log = run.folder / f"worker-{number}.log"
        command = [sys.executable, "-m", "tests.parallel_pytest", str(writing), *run.arguments]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "-p", "no:cacheprovider", f"--basetemp={run.folder / f'tmp-{number}'}"],
                cwd=run.root,
                env={**os.environ, "PACELINE_TEST_SHARED": str(run.folder)},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=[writing],
                text=True,
                start_new_session=True,  # killed together with the ranks that its tests started
            )
        os.close(writing)
        self.given: deque[str] = deque()
        self.since_s = time.monotonic() + START_S
        self.verdict = ""  # why it was killed
        threading.Thread(target=self._listen, args=(reading, run.inbox), daemon=True).start()

    def _listen(self, fd: int, inbox: queue.Queue[tuple[Job, Event | None]]) -> None:
        with os.fdopen(fd, encoding="utf-8") as events:
            for line in events:
                inbox.put((self, json.loads(line)))
        inbox.put((self, None))

    def send(self, test: str) -> None:
        if test:
            self.given.append(test)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead, which will be heard
            self.process.stdin.write(f"{test}\n")
            self.process.stdin.flush()

    def wait(self) -> int:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        return self.process.wait()

    def kill(self, verdict: str) -> None:
        self.verdict = self.verdict or verdict
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)


class ParallelRun:
    """Every test once, over `num_jobs` workers. `say` gets lines for the reader."""

    def __init__(
        self,
        root: Path,
        arguments: Sequence[str],
        folder: Path,
        say: Callable[[str], None],
        *,
        test_s: float,
        seconds: float,
    ) -> None:
        """`test_s` is the most for one test, `seconds` for all; `folder` is for logs."""
        self.root, self.arguments, self.folder = root, arguments, folder
        self.inbox: queue.Queue[tuple[Job, Event | None]] = queue.Queue()
        self.done: list[Done] = []
        self._say, self._test_s, self._seconds = say, test_s, seconds
        self._jobs: list[Job] = []
        self._waiting: deque[str] | None = None  # None: nothing is collected yet
        self._num_tests = self._num_started = 0
        self._most_started = MOST_RESTARTS
        self._began_s = self._said_s = time.monotonic()

    def run(self, num_jobs: int) -> list[Done]:
        self._most_started += num_jobs
        try:
            for _ in range(num_jobs):
                self._start()
            while self._jobs:
                self._take_event()
                self._watch_the_clock()
        finally:
            for job in self._jobs:  # left over where the reader pressed Ctrl-C
                job.kill("It was interrupted.")
                job.wait()
        for test in self._waiting or ():
            self._fail(test, "It did not run: no time or no worker was left.")
        return self.done

    def _start(self) -> None:
        self._jobs.append(Job(self._num_started, self))
        self._num_started += 1

    def _take_event(self) -> None:
        try:
            job, event = self.inbox.get(timeout=1.0)
        except queue.Empty:
            return
        if event is None:
            self._bury(job)
        elif "collected" in event:
            if self._waiting is None:
                self._waiting = deque(event["collected"])
                self._num_tests = len(self._waiting)
            self._feed(job, self._waiting)
        elif "broken" in event:  # every worker says so
            if event["broken"] not in {done.test for done in self.done}:
                self._fail(event["broken"], event["text"])
        elif not job.verdict:
            assert self._waiting is not None
            job.given.popleft()
            self._note(Done(**event))
            if POISON in event["text"]:
                job.kill(POISON)
            else:
                self._feed(job, self._waiting)

    def _feed(self, job: Job, waiting: deque[str]) -> None:
        job.since_s = time.monotonic()
        while len(job.given) < AHEAD and waiting:
            job.send(waiting.popleft())
        if not waiting:
            job.send("")

    def _bury(self, job: Job) -> None:
        code = job.wait()
        self._jobs.remove(job)
        lost = list(job.given)
        if job.verdict != POISON and (lost or code):
            culprit = lost.pop(0) if lost else f"worker {job.number}, outside of any test"
            tail = job.log.read_text(encoding="utf-8", errors="replace")[-4000:]
            self._fail(culprit, f"{job.verdict or f'Its process ended with {code}.'}\n{tail}")
        if self._waiting is None:
            return
        self._waiting.extendleft(reversed(lost))
        if self._waiting and not self._is_over() and self._num_started < self._most_started:
            self._start()

    def _watch_the_clock(self) -> None:
        now_s = time.monotonic()
        for job in self._jobs:
            if self._is_over():
                job.kill(f"It was stopped: no time was left after {self._seconds:g} s.")
            elif now_s - job.since_s > self._test_s:
                job.kill(f"It did not end within {self._test_s:g} s.")
        if now_s - self._said_s > PROGRESS_S:
            self._said_s = now_s
            failed = sum(done.outcome == "failed" for done in self.done)
            took_s = now_s - self._began_s
            self._say(f"[{took_s:4.0f} s] {len(self.done)} of {self._num_tests}, {failed} failed")

    def _is_over(self) -> bool:
        return time.monotonic() - self._began_s > self._seconds

    def _fail(self, test: str, text: str) -> None:
        self._note(Done(test, "failed", 0.0, text))

    def _note(self, done: Done) -> None:
        self.done.append(done)
        if done.outcome == "failed":
            self._say(f"FAILED {done.test}\n{done.text}")


if __name__ == "__main__":
    sys.exit(work(int(sys.argv[1]), sys.argv[2:]))
