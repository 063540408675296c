"""The server with the engine for tests, started as a user types it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from tests.support.processes import stop
from tests.support.serving import wait_serving
from weightsync_client import Client, RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(120)

_START_S = 60.0
_COMMAND = Path(sys.executable).with_name("weightsync-server")


def _tensors(seed: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((8, 4), float(seed), dtype=torch.bfloat16), "b": torch.zeros(3) + seed}


def _flags(folder: Path, model: Path) -> list[str]:
    return [
        *("--engine", "memory", "--model", str(model), "--ranks", "2", "--store", "memory://"),
        *("--listen", f"unix:{folder}/server.sock", "--run-dir", f"{folder}/run"),
        *("--state-dir", f"{folder}/state", "--metrics", ""),
    ]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="wsm") as name:
        yield Path(name)


@contextlib.contextmanager
def _served(folder: Path, model: Path) -> Iterator[Client]:
    """Run a server as a user types it, until the body ends; it must end well then."""
    server = subprocess.Popen([_COMMAND, *_flags(folder, model)])
    try:
        with Client(f"unix:{folder}/server.sock") as client:
            wait_serving(server, client, _START_S)
            yield client
    finally:
        assert stop(server) == 0


@pytest.mark.parametrize("shape", ["file", "folder"])
def test_push_apply_rollback_and_stop(folder: Path, shape: str) -> None:
    model = folder / "model.safetensors"
    if shape == "folder":
        model = folder / "model"
        model.mkdir()
        save_file({"w": _tensors(1)["w"]}, model / "model-00001-of-00002.safetensors")
        save_file({"b": _tensors(1)["b"]}, model / "model-00002-of-00002.safetensors")
    else:
        save_file(_tensors(1), model)
    with _served(folder, model) as client:
        version = client.push(_tensors(2)).version
        report = client.apply(version)
        assert [rank.rank for rank in report.ranks] == ["0/0/0", "0/0/1"]
        proof = client.verify()
        assert proof.verified
        assert proof.version == version
        assert client.rollback().report.version == 1
        with pytest.raises(RefusedError, match="push this model"):
            client.apply(client.push({"other": torch.zeros(1)}).version)
        wrapped = {f"module.{name}": tensor for name, tensor in _tensors(3).items()}
        with pytest.raises(RefusedError, match=r"remove the prefix 'module\.' from"):
            client.apply(client.push(wrapped).version)
        (status,) = client.status().models
        assert status.live_version == 1


@pytest.mark.parametrize("content", [None, b"", b"\xff" * 100, b"\x10\0\0\0\0\0\0\0{}"])
def test_a_model_that_is_none_is_one_sentence(folder: Path, content: bytes | None) -> None:
    model = folder / "model.safetensors"
    if content is not None:
        model.write_bytes(content)
    done = subprocess.run(
        [_COMMAND, *_flags(folder, model)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("weightsync-server: --model ")
    assert "Traceback" not in done.stderr


def test_a_part_is_based_on_the_checkpoint_that_is_served(folder: Path) -> None:
    model = folder / "model.safetensors"
    save_file(_tensors(1), model)
    with _served(folder, model) as client:
        pushed = client.push({"w": _tensors(2)["w"]}, partial=True)
        assert pushed.base_version == 1
        client.apply(pushed.version)
        assert client.verify().verified
        found = {tensor.name: tensor.torch() for tensor in client.tensors(pushed.version)}
        assert torch.equal(found["w"], _tensors(2)["w"])
        assert torch.equal(found["b"], _tensors(1)["b"])
        assert client.rollback().report.version == 1
        # From the way back on, too.
        again = client.push({"b": _tensors(3)["b"]}, partial=True, base=1)
        client.apply(again.version)
        assert client.verify().verified
