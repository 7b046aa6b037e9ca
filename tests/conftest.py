"""What every test folder shares: nothing is inherited from the shell, GPU tests are skipped without
a GPU, and the time limit is ignored without its plugin: a GPU machine may have plain pytest only.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.ladder import Workshop

gc.disable()  # until all tests are collected: modules leave nothing to find
# A script starts its background jobs with SIGINT ignored, and every child inherits that, as it
# inherits blocked signals. With a handler here, children begin with the default.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
# Servers under test are on loopback, where no proxy is asked. These variables change what is
# tested: the key that clients must know, the hub, the width of help texts, how kernels run.
for _name in ("NO_PROXY", "no_proxy"):
    os.environ[_name] = f"{os.environ.get(_name, '')},localhost,127.0.0.1".lstrip(",")
for _name in [*os.environ]:
    if _name in ("PACELINE_API_KEY", "COLUMNS", "TRITON_INTERPRET") or _name.startswith("HF_"):
        del os.environ[_name]
# Tests run in parallel processes. A second thread for tiny products gains nothing, and threads that
# spin for a core that is taken cost fifty times the work. A test of threads gives their number.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds per test; without pytest-timeout there is no limit")


def pytest_configure(config: pytest.Config) -> None:
    _settle_hypothesis()
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): ignored without pytest-timeout")


def _settle_hypothesis() -> None:
    """The same examples in every run, and no opinion of hypothesis about the machine's speed."""
    try:
        from hypothesis import HealthCheck, settings
    except ImportError:
        return
    settings.register_profile(
        "any machine", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("any machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests or os.environ.get("PACELINE_TEST_DEVICE") == "cpu":  # see tests/gpu/engines.py
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
        for item in gpu_tests:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Modules and thousands of tests stay until the end. A garbage collection that visits all of
    them takes most of a second, and everything that starts or ends an engine here asks for one."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """A command that runs in this process leaves no handler, whose stream is closed by then."""
    loggers = [logging.getLogger(name) for name in ("paceline", "uvicorn", "asyncio")]
    before = [(log.handlers[:], log.level, log.propagate) for log in loggers]
    yield
    for log, (handlers, level, propagate) in zip(loggers, before, strict=True):
        log.handlers[:], log.propagate = handlers, propagate
        log.setLevel(level)


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """One for all folders of tests and for all processes that run them."""
    from tests.e2e.ladder import Workshop

    return Workshop(shared_folder(tmp_path_factory) / "workshop")


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """One for all processes of a run, those of pytest-xdist and of tests/parallel_pytest.py."""
    given = os.environ.get("PACELINE_TEST_SHARED")
    folder = factory.getbasetemp()
    is_shared = "PYTEST_XDIST_WORKER" in os.environ
    return Path(given) if given else folder.parent if is_shared else folder
