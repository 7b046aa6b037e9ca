"""Chromium, driven by playwright-core over a pipe; and web/ with its packages.

Where there is no Chromium, no npm or no way to fetch the packages, tests are skipped with a line
that says so.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.source_tree import ROOT
from tests.patience import wait_for

WEB = ROOT / "web"


def web_with_packages(folder: Path) -> Path:
    """web/ with node_modules: the repository's own, or a copy in `folder`."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("needs npm and node")
    if (WEB / "node_modules" / "playwright-core").exists():
        return WEB
    copy = folder / "web"
    if not copy.exists():
        shutil.copytree(WEB, copy, ignore=shutil.ignore_patterns("node_modules"))
        command = ["npm", "ci", "--no-audit", "--no-fund"]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
        if done.returncode:
            shutil.rmtree(copy)
            pytest.skip(f"npm cannot fetch the packages of web/: {done.stderr[-200:]}")
    return copy


class Browser:
    """One tab. Commands are those of browser.mjs."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self._popen = popen
        self._answer()

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> Any:
            assert self._popen.stdin is not None
            self._popen.stdin.write(json.dumps([name, *given]) + "\n")
            self._popen.stdin.flush()
            return self._answer()

        return call

    def _answer(self) -> Any:
        assert self._popen.stdout is not None
        answer: dict[str, Any] = json.loads(
            self._popen.stdout.readline() or '{"error": "it ended"}'
        )
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def text(self, what: str) -> str:
        """The visible text of the first such element; empty if there is none or it is hidden."""
        script = f"document.querySelector({json.dumps(what)})?.checkVisibility()"
        shown = f"{script} ? document.querySelector({json.dumps(what)}).innerText : ''"
        return str(self.value(shown))

    def wait(self, script: str) -> None:
        """Until a piece of JavaScript is true."""
        wait_for(lambda: bool(self.value(script)))

    def wait_text(self, what: str, part: str) -> None:
        wait_for(lambda: part in self.text(what))


@contextlib.contextmanager
def browsing(web: Path) -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("needs Chromium: apt install chromium")
    playwright = web / "node_modules" / "playwright-core" / "index.mjs"
    driver = Path(__file__).with_suffix(".mjs")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = ["node", str(driver), str(playwright), chromium, profile]
        popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        try:
            yield Browser(popen)
        finally:
            assert popen.stdin is not None
            popen.stdin.close()  # it closes Chromium and ends
            try:
                popen.wait(30)
            finally:
                popen.kill()
                popen.wait()
                assert popen.stdout is not None
                popen.stdout.close()
