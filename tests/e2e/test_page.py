"""The page in a real browser: chat, stop, comparison, live view, key, a server that goes and comes.

Most of it needs Chromium and npm, so it is in the tier `more`.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.engine.outputs import Delta, TokenSource
from paceline.server.page_files import FOLDER
from tests.conftest import shared_folder
from tests.e2e.browser import Browser, browsing, web_with_packages
from tests.e2e.serving import save_served, served
from tests.patience import wait_for
from tests.server.fake_client import Asked, FakeClient, Steps, ids_of
from tests.server.serving import serving

pytestmark = pytest.mark.more

IS_IDLE = "!document.querySelector('#send').hidden"
MANY = 40
EVIL = (
    "**bold** <img src=x onerror=alert(1)> <script>alert(2)</script>\n\n"
    "[bad](javascript:alert(3)) ![pic](http://example.com/a.png)\n\n"
    "```python\ndef f(x):\n    return x\n```\n"
)


def step(text: str, *, is_last: bool = False) -> list[Delta]:
    """A step whose tokens but the last are accepted drafts."""
    ids = ids_of(text)
    sources: list[TokenSource] = ["draft"] * len(ids)
    sources[-1] = "drawn"
    return [Delta(0, text, ids, sources=sources, finish_reason="stop" if is_last else None)]


def words(asked: Asked) -> Steps:
    return [step(f"word{i} ", is_last=i == MANY - 1) for i in range(MANY)]


def evil(asked: Asked) -> Steps:
    return [step(EVIL, is_last=True)]


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return web_with_packages(shared_folder(tmp_path_factory))


@pytest.fixture
def browser(web: Path) -> Iterator[Browser]:
    with browsing(web) as opened:
        yield opened


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page") / "model"
    save_served(folder)
    return folder


def ask(browser: Browser, text: str) -> None:
    browser.fill("#prompt", text)
    browser.press("Enter")


def test_the_committed_files_are_what_the_sources_build(web: Path, tmp_path: Path) -> None:
    subprocess.run(["node", "build.mjs", str(tmp_path)], cwd=web, check=True)
    built = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    committed = {path.name: path.read_bytes() for path in FOLDER.iterdir()}
    assert built.keys() == committed.keys()
    different = [name for name in built if built[name] != committed[name]]
    assert not different, f"run `npm ci && npm run build` in web/: {different}"
    assert sum(map(len, committed.values())) < 400_000


def test_an_answer_streams_with_its_sources_and_figures(browser: Browser) -> None:
    client = FakeClient(words, by_hand=True)
    with serving(client) as server:
        browser.open(server.url)
        browser.wait_text("#model", "tiny")
        ask(browser, "Say words")
        client.await_asked(1)
        client.allow(3)
        browser.wait_text(".answer > .text", "word2")
        assert "word3" not in browser.text(".answer > .text")
        client.allow(10 * MANY)
        browser.wait(IS_IDLE)
        stats = browser.text(".stats")
        assert "tokens/s" in stats
        assert "first token" in stats
        drafts = sum(len(ids_of(f"word{i} ")) - 1 for i in range(MANY))
        assert f"{drafts} accepted drafts, {MANY} drawn" in stats
        assert browser.value("CSS.highlights.get('draft-0').size") == MANY // 2
        assert browser.value("CSS.highlights.get('draft-1').size") == MANY // 2
        browser.click("text=Regenerate")
        client.await_asked(2)
        assert client.last.prompt == client.asked[0].prompt
        browser.wait(IS_IDLE)
        ask(browser, "And again")
        client.await_asked(3)
        assert "word39" in (client.last.prompt or "")
        browser.wait(IS_IDLE)
        assert browser.problems() == []


def test_stop_ends_the_request_and_keeps_what_came(browser: Browser) -> None:
    client = FakeClient(words, by_hand=True)
    with serving(client) as server:
        browser.open(server.url)
        browser.wait_text("#model", "tiny")
        ask(browser, "Say words")
        client.await_asked(1)
        client.allow(2)
        browser.wait_text(".answer > .text", "word1")
        browser.press("Escape")
        wait_for(lambda: client.aborted == [client.last.request_id])
        browser.wait_text(".stats", "stopped")
        assert browser.value(IS_IDLE)
        assert browser.problems() == []


def test_text_of_the_model_is_markdown_and_runs_nothing(browser: Browser) -> None:
    with serving(FakeClient(evil)) as server:
        browser.open(server.url)
        browser.wait_text("#model", "tiny")
        ask(browser, "Be evil")
        browser.wait("document.querySelector('.stats span') !== null")
        browser.wait(IS_IDLE)
        inside = ".answer > .text"
        assert browser.text(f"{inside} strong") == "bold"
        assert "<script>alert(2)</script>" in browser.text(inside)
        assert browser.value(f"document.querySelectorAll('{inside} :is(img, script)').length") == 0
        hrefs = f"[...document.querySelectorAll('{inside} a')].map((a) => a.getAttribute('href'))"
        assert browser.value(hrefs) in ([], [None])
        assert "def" in browser.text(f"{inside} .hljs-keyword")
        assert browser.problems() == []
        assert all(url.startswith(server.url) for url in browser.requests())


def test_settings_and_the_key_are_sent(browser: Browser) -> None:
    client = FakeClient(words)
    with serving(client, api_key="secret") as server:
        browser.open(server.url)
        browser.wait("document.querySelector('#key-dialog').open")
        browser.fill("#key", "secret")
        browser.press("Enter")
        browser.wait_text("#model", "tiny")
        browser.click("#settings summary")
        browser.fill("#temperature", "0.5")
        browser.fill("#max_tokens", "77")
        browser.fill("#seed", "9")
        browser.fill("#system", "Be short")
        browser.click("label:has-text('Without')")
        ask(browser, "Hi")
        browser.wait("document.querySelector('.stats span') !== null")
        params = client.last.params
        assert (params.temperature, params.max_tokens, params.seed) == (0.5, 77, 9)
        assert params.num_speculative_tokens == 0
        assert "<system>Be short" in (client.last.prompt or "")
        assert browser.value("sessionStorage.getItem('paceline-key')") == "secret"
        assert browser.problems() == []


def test_compare_live_view_and_a_server_that_goes_and_comes_back(
    browser: Browser, model: Path, tmp_path: Path
) -> None:
    with served(model, tmp_path / "log") as server:
        port = server.port
        browser.open(f"http://127.0.0.1:{port}")
        browser.wait("document.querySelector('#model').textContent !== ''")
        _compare_and_watch(browser, tmp_path)
        _look_at_three_widths(browser, tmp_path)
        server.send_signal(signal.SIGTERM)
        server.await_exit()
    browser.wait_text("#banner", "does not answer")
    # The later --port is the one that counts.
    with served(model, tmp_path / "log2", "--port", str(port)):
        browser.wait("!/does not answer/.test(document.querySelector('#banner').innerText)")
        browser.value("document.querySelector('#new-chat').click()")
        ask(browser, "and once more")
        browser.wait("document.querySelectorAll('.verdict').length === 1")
    lost = [p for p in browser.problems() if "ERR_" not in p and "503" not in p]
    assert lost == []


def _compare_and_watch(browser: Browser, folder: Path) -> None:
    # Encoded again, the first answer takes more tokens; both questions must fit into the context.
    browser.click("#settings summary")
    browser.fill("#max_tokens", "64")
    browser.click("#settings summary")
    browser.click("label:has-text('Compare')")
    browser.fill("#prompt", "one two one two one two one two")
    browser.click("#send")
    browser.wait_text(".verdict", "The texts are equal")
    stats = browser.value("[...document.querySelectorAll('.stats')].map((e) => e.innerText)")
    assert len(stats) == 2
    assert " 0 accepted drafts" in stats[1]
    browser.wait_text("#lane-hint", "device idle")
    lanes = "document.querySelector('#lanes').toDataURL()"
    before = browser.value(lanes)
    browser.wait(IS_IDLE)
    ask(browser, "three four three four")
    browser.wait(f"{lanes} !== {json.dumps(before)}")
    browser.wait("document.querySelectorAll('.verdict').length === 2")
    browser.download("#trace", str(folder / "trace.json"))
    trace = json.loads((folder / "trace.json").read_text(encoding="utf-8"))
    assert any(event.get("cat") == "device" for event in trace["traceEvents"])
    assert browser.problems() == []


def _look_at_three_widths(browser: Browser, folder: Path) -> None:
    """A person looks at the pictures; the test only knows that nothing is wider than the page."""
    for width, height in ((1440, 900), (820, 1100), (390, 844)):
        browser.size(width, height)
        for view in ("chat", "live") if width < 1080 else ("chat",):
            browser.value(f"document.querySelector('#tab-{view}').click()")
            for scheme in ("light", "dark"):
                browser.scheme(scheme)
                browser.picture(str(folder / f"page-{width}-{view}-{scheme}.png"))
            is_wider = "document.documentElement.scrollWidth > innerWidth"
            assert not browser.value(is_wider), f"{view} scrolls sideways at {width}"
    browser.value("document.querySelector('#tab-chat').click()")
