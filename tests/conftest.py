"""What every test folder shares: GPU tests step aside without a GPU, the time limit without its
plugin, so that the tests can be collected on a machine that has little beside pytest."""

from __future__ import annotations

import os

import pytest


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
