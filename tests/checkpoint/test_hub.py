"""Hub ids are fetched, cached and refused with advice, against a server with the hub's routes.

huggingface_hub reads its environment when it is imported, so each case runs in a new process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.fake_hub import FakeHub, Repo, serving

FIRST, SECOND = "a" * 40, "b" * 40
CONFIG = b'{"model_type": "llama", "hidden_size": 8}'
WEIGHTS = bytes(range(256)) * 4
SCRIPT = """
import json, sys
from paceline.checkpoint.source import locate
from paceline.errors import CheckpointError
for arguments in json.loads(sys.argv[2]):
    try:
        files = locate(sys.argv[1], **arguments)
    except CheckpointError as error:
        print(json.dumps({"error": str(error)}))
    else:
        there = {p.name: p.stat().st_size for p in files.folder.iterdir()}
        weights = [p.name for p in files.weight_files]
        print(json.dumps({"config": files.config, "there": there, "weights": weights,
                          "kind": files.kind, "folder": str(files.folder)}))
"""


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    first = {
        "config.json": CONFIG,
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b"{}",
        "README.md": b"read me",
        "model.safetensors": WEIGHTS,
        "pytorch_model.bin": WEIGHTS,
        "onnx/model.onnx": WEIGHTS,
        "original/consolidated.00.pth": WEIGHTS,
    }
    second = {**first, "config.json": CONFIG.replace(b"8", b"16")}
    refs = {"main": FIRST, "v2": SECOND}
    repo = Repo({FIRST: first, SECOND: second}, refs)
    with serving(FakeHub({"tiny/model": repo})) as server:
        yield server


def locate(hub: FakeHub, home: Path, model: str = "tiny/model", **options: Any) -> dict[str, Any]:
    """`locate` in a separate process. Options in capitals are environment variables."""
    environment = {k: str(v) for k, v in options.items() if k.isupper()}
    arguments = {k: v for k, v in options.items() if not k.isupper()}
    return locate_each(hub, home, [arguments], model, **environment)[0]


def locate_each(
    hub: FakeHub,
    home: Path,
    calls: list[dict[str, Any]],
    model: str = "tiny/model",
    *,
    script: str = SCRIPT,
    **environment: str,
) -> list[dict[str, Any]]:
    """Several calls in one new process."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", script, model, json.dumps(calls)],
        env={**kept, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_model_is_fetched_with_one_set_of_weights(hub: FakeHub, tmp_path: Path) -> None:
    got = locate(hub, tmp_path)
    assert got["config"] == {"model_type": "llama", "hidden_size": 8}
    assert got["weights"] == ["model.safetensors"]
    assert got["there"] == {
        "config.json": len(CONFIG),
        "tokenizer.json": 2,
        "tokenizer_config.json": 2,
        "model.safetensors": len(WEIGHTS),
    }


def test_the_load_format_decides_which_weights_are_fetched(hub: FakeHub, tmp_path: Path) -> None:
    got = locate(hub, tmp_path, load_format="pt")
    assert got["weights"] == ["pytorch_model.bin"]
    assert "model.safetensors" not in got["there"]


def test_without_weights_only_the_small_files_are_fetched(hub: FakeHub, tmp_path: Path) -> None:
    for got in locate_each(hub, tmp_path, [{"with_weights": False}, {"load_format": "dummy"}]):
        assert got["weights"] == []
        assert "model.safetensors" not in got["there"]
    assert hub.requests("model.safetensors") == []


def test_sharded_weights_are_fetched_whole(hub: FakeHub, tmp_path: Path) -> None:
    files = hub.repos["tiny/model"].commits[FIRST]
    del files["model.safetensors"]
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {"a": shards[0], "b": shards[1]}}
    files.update(dict.fromkeys(shards, WEIGHTS))
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    assert locate(hub, tmp_path)["weights"] == shards


def test_a_second_start_fetches_no_file_again(hub: FakeHub, tmp_path: Path) -> None:
    first = locate(hub, tmp_path)
    hub.log.clear()
    assert locate(hub, tmp_path) == first
    assert [path for method, path, _ in hub.log if method == "GET" and "/resolve/" in path] == []


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: FakeHub, tmp_path: Path) -> None:
    calls = [{}, {"revision": "v2"}, {"revision": SECOND}]
    got = locate_each(hub, tmp_path, calls)
    assert [files["config"]["hidden_size"] for files in got] == [8, 16, 16]


def test_an_unknown_revision_is_named(hub: FakeHub, tmp_path: Path) -> None:
    error = locate(hub, tmp_path, revision="v9")["error"]
    assert "tiny/model has no revision 'v9'" in error
    assert "branch, tag or commit" in error


def test_an_unknown_repository_is_named(hub: FakeHub, tmp_path: Path) -> None:
    error = locate(hub, tmp_path, "tiny/nothing")["error"]
    assert "tiny/nothing" in error
    assert "no such repository (404)" in error


def test_a_private_repository_asks_for_a_token(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["tiny/model"].token = "hf_secret"
    error = locate(hub, tmp_path)["error"]
    assert "access is refused (401)" in error
    assert "hf auth login" in error
    assert "HF_TOKEN" in error
    assert locate(hub, tmp_path, HF_TOKEN="hf_secret")["weights"] == ["model.safetensors"]


def test_a_gated_repository_says_where_to_ask(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["tiny/model"].token = "hf_secret"
    hub.repos["tiny/model"].is_gated = True
    error = locate(hub, tmp_path, HF_TOKEN="hf_secret")["error"]
    assert f"is gated (403): ask for access at {hub.url}/tiny/model" in error


def test_offline_uses_the_cache_and_asks_nothing(hub: FakeHub, tmp_path: Path) -> None:
    first = locate(hub, tmp_path)
    hub.log.clear()
    assert locate(hub, tmp_path, HF_HUB_OFFLINE=1) == first
    assert hub.log == []


def test_offline_and_not_cached_says_what_to_do(hub: FakeHub, tmp_path: Path) -> None:
    error = locate(hub, tmp_path, HF_HUB_OFFLINE=1)["error"]
    assert "tiny/model is not in the cache" in error
    assert "HF_HUB_OFFLINE is set" in error
    assert "hf download tiny/model" in error


def test_offline_with_half_a_model_says_so(hub: FakeHub, tmp_path: Path) -> None:
    locate(hub, tmp_path, with_weights=False)
    error = locate(hub, tmp_path, HF_HUB_OFFLINE=1)["error"]
    assert "only partly in the cache" in error
    assert "HF_HUB_OFFLINE is set" in error
    assert "holds no weights" in error


def test_a_hub_that_is_down_leaves_the_cache(hub: FakeHub, tmp_path: Path) -> None:
    first = locate(hub, tmp_path)
    hub.is_down = True
    assert locate(hub, tmp_path) == first
    error = locate(hub, tmp_path / "empty")["error"]
    assert "answers 503" in error


def test_a_hub_out_of_reach_leaves_the_cache(hub: FakeHub, tmp_path: Path) -> None:
    first = locate(hub, tmp_path)
    nowhere = "http://127.0.0.1:9"
    assert locate(hub, tmp_path, HF_ENDPOINT=nowhere) == first
    error = locate(hub, tmp_path / "empty", HF_ENDPOINT=nowhere)["error"]
    assert f"{nowhere} cannot be reached" in error


def test_a_line_that_drops_is_resumed_where_it_broke(hub: FakeHub, tmp_path: Path) -> None:
    weights = os.urandom(1 << 20) * 12
    hub.repos["tiny/model"].commits[FIRST]["model.safetensors"] = weights
    hub.cut_once["model.safetensors"] = 11 << 20
    got = locate(hub, tmp_path)
    assert (Path(got["folder"]) / "model.safetensors").read_bytes() == weights
    ranges = hub.requests("model.safetensors")
    assert ranges[0] is None
    assert ranges[-1] is not None
    assert int(ranges[-1].removeprefix("bytes=").rstrip("-")) > 0


def test_files_that_were_whole_are_kept_when_a_start_fails(hub: FakeHub, tmp_path: Path) -> None:
    hub.failing["model.safetensors"] = 403  # 5xx would be tried again for half a minute
    error = locate(hub, tmp_path)["error"]
    assert "tiny/model cannot be read" in error
    assert "(403)" in error
    hub.failing.clear()
    hub.log.clear()
    assert locate(hub, tmp_path)["weights"] == ["model.safetensors"]
    assert len(hub.requests("model.safetensors")) == 1
    assert hub.requests("config.json") == []


def test_a_repository_of_one_gguf_is_fetched(hub: FakeHub, tmp_path: Path) -> None:
    from tests.checkpoint.gguf_writing import write_gguf
    from tests.tiny import save_tiny

    write_gguf(tmp_path / "x.gguf", save_tiny(tmp_path / "hf", "llama"))
    files = {"README.md": b"", "tiny.gguf": (tmp_path / "x.gguf").read_bytes()}
    hub.repos["tiny/gguf"] = Repo({FIRST: files}, {"main": FIRST})
    got = locate(hub, tmp_path / "home", "tiny/gguf")
    assert (got["kind"], got["weights"]) == ("gguf", ["tiny.gguf"])
    assert locate(hub, tmp_path / "home", "tiny/gguf", HF_HUB_OFFLINE=1) == got
    files["other.gguf"] = b"GGUF"
    error = locate(hub, tmp_path / "new", "tiny/gguf")["error"]
    assert "2 GGUF files" in error


def test_a_repository_that_is_no_model_says_what_it_holds(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["tiny/data"] = Repo({FIRST: {"data.json": b"{}"}}, {"main": FIRST})
    error = locate(hub, tmp_path, "tiny/data")["error"]
    assert "no config.json" in error
    assert "data.json" in error


def test_a_full_disk_is_told(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["tiny/model"].commits[FIRST]["model.safetensors"] = bytes(1 << 20)
    limited = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (200000, 200000))\n"
    (got,) = locate_each(hub, tmp_path, [{}], script=limited + SCRIPT)
    assert "could not be written" in got["error"]
    assert "HF_HOME" in got["error"]
