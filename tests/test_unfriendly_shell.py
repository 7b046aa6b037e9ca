"""Tests depend on nothing that a shell hands down: signals, variables, umask, standard input."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.architecture.source_tree import ROOT
from tests.patience import PATIENCE_S

NOWHERE = "http://127.0.0.1:9"
VARIABLES = {
    **dict.fromkeys(("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY"), NOWHERE),
    "HF_ENDPOINT": NOWHERE,
    "HF_HUB_OFFLINE": "1",
    "PACELINE_API_KEY": "sesame",
    "COLUMNS": "30",
    "NO_COLOR": "1",
    "TRITON_INTERPRET": "1",
    "LC_ALL": "C",
}
# Each failed from such a shell, before conftest.py set what it needs.
TESTS = (
    "tests/test_cli_chat.py::test_ctrl_c_stops_the_answer_and_not_the_program",
    "tests/test_cli_process.py::test_ctrl_c_while_loading_ends_it_and_leaves_no_child",
    "tests/test_cli_parsing.py::test_help_names_every_command",
    "tests/checkpoint/test_hub.py::test_a_model_is_fetched_with_one_set_of_weights",
    "tests/server/test_openai_client.py::test_models",
)


def test_tests_pass_from_the_background_of_a_script_with_odd_variables() -> None:
    """A script's background jobs ignore SIGINT."""
    command = f"umask 077; trap '' INT; exec {sys.executable} -m pytest -q {' '.join(TESTS)} <&-"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env={**os.environ, **VARIABLES},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(TESTS)} passed" in done.stdout
