"""API keys from a file: which are valid, what each may use, and what the log says of others."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path

import pytest

from paceline.errors import ConfigError, Overloaded
from paceline.server.api_keys import ApiKeys
from tests.server.fake_client import FakeClient
from tests.server.serving import JSON, serving

ALICE = "alice-key name=alice max_open=2\n"
BOB = "bob-key name=bob tokens_per_minute=600\n"


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def write(path: Path, text: str) -> str:
    """Each version of the file has another time stamp, as an editor's would."""
    version = path.stat().st_mtime_ns + 10**9 if path.exists() else 10**18
    path.write_text(text, encoding="utf-8")
    os.utime(path, ns=(version, version))
    return str(path)


def test_every_key_of_the_file_and_the_flag_is_valid(tmp_path: Path) -> None:
    keys = ApiKeys("flag-key", write(tmp_path / "keys", f"# people\n\n{ALICE}{BOB}"))
    names = {key: keys.find(key.encode()) for key in ("flag-key", "alice-key", "bob-key", "x", "")}
    assert {key: a.name if a else None for key, a in names.items()} == {
        "flag-key": "--api-key",
        "alice-key": "alice",
        "bob-key": "bob",
        "x": None,
        "": None,
    }


def test_the_file_is_read_again_when_it_changes_and_open_requests_still_count(
    tmp_path: Path,
) -> None:
    clock, path = Clock(), tmp_path / "keys"
    keys = ApiKeys(None, write(path, ALICE), clock)
    alice = keys.find(b"alice-key")
    assert alice is not None
    alice.begin(clock.now_s)
    write(path, BOB + ALICE.replace("2", "1"))
    clock.now_s += 2
    assert keys.find(b"bob-key") is not None
    again = keys.find(b"alice-key")
    assert again is alice
    with pytest.raises(Overloaded, match="1 open requests"):
        again.begin(clock.now_s)
    alice.end(0)
    again.begin(clock.now_s)
    write(path, BOB)
    clock.now_s += 2
    assert keys.find(b"alice-key") is None


def test_a_key_is_compared_with_all_keys_whichever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time does not tell which key is right, or how much of it."""
    keys = ApiKeys("flag-key", write(tmp_path / "keys", ALICE + BOB))
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr("paceline.server.api_keys.hmac.compare_digest", compare)
    for key in (b"flag-key", b"bob-key", b"alice-ke", b"", b"x" * 1000):
        compared.clear()
        keys.find(key)
        assert [(len(a), len(b)) for a, b in compared] == [(32, 32)] * 3


@pytest.mark.parametrize("text", ["", "# none\n", "k max_open=-1", "k limit=3", "k max_open"])
def test_a_broken_file_ends_the_start_but_not_a_running_server(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"keys"):
        ApiKeys(None, write(tmp_path / "keys", text))
    clock, path = Clock(), tmp_path / "later"
    keys = ApiKeys(None, write(path, ALICE), clock)
    write(path, text)
    clock.now_s += 2
    assert keys.find(b"alice-key") is not None


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere cannot be read"):
        ApiKeys(None, str(tmp_path / "nowhere"))


def test_tokens_per_minute_come_back_with_time(tmp_path: Path) -> None:
    keys = ApiKeys(None, write(tmp_path / "keys", BOB))
    bob = keys.find(b"bob-key")
    assert bob is not None
    bob.begin(1000.0)
    bob.end(1200)  # 600 more than it had
    with pytest.raises(Overloaded) as refused:
        bob.begin(1000.0)
    assert refused.value.retry_after_s == 61
    with pytest.raises(Overloaded):
        bob.begin(1059.0)
    bob.begin(1061.0)


def test_a_server_serves_each_key_within_its_limits_and_logs_who_was_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    path = write(tmp_path / "keys", "small-key name=small tokens_per_minute=1\nlarge-key\n")
    fields = {"model": "tiny", "prompt": "abc", "max_tokens": 4}
    with serving(FakeClient(), api_key_file=path) as server:

        def post(key: str) -> tuple[int, str]:
            headers = {**JSON, "Authorization": f"Bearer {key}"}
            reply = server.request("POST", "/v1/completions", json.dumps(fields), headers)
            return reply.status, reply.headers.get("retry-after", "")

        assert post("small-key")[0] == 200
        status, retry_after = post("small-key")
        assert status == 429
        assert int(retry_after) > 1
        assert post("large-key")[0] == 200
        assert post("stolen-key")[0] == 401
        assert server.get("/health").status == 200
    assert "refused 127.0.0.1: the API key is wrong" in caplog.text
    assert re.search(r"/v1/completions 429 .* key small: This API key has used", caplog.text)
    assert not re.search("stolen-key|small-key|large-key", caplog.text)
