"""What every test folder shares: GPU tests step aside without a GPU, the time limit without its
plugin, so that the tests can be collected on a machine that has little beside pytest."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.ladder import Workshop

# Tests run side by side. Threads of tiny products would gain nothing and wait for each other in
# loops: where the cores are taken, that costs fifty times the work. Whoever tests threads asks
# for them by number.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds per test; without pytest-timeout there is no limit")


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): ignored without pytest-timeout")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests or os.environ.get("PACELINE_TEST_DEVICE") == "cpu":  # see tests/gpu/engines.py
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
        for item in gpu_tests:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """One for all folders of tests and, under pytest-xdist, for all processes that run them."""
    from tests.e2e.ladder import Workshop

    folder = tmp_path_factory.getbasetemp()
    return Workshop((folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "workshop")
