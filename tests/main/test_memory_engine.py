"""The server with the engine for tests, started as a user types it."""

from __future__ import annotations

import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from tests.support.serving import SERVER, memory_flags, serving_memory
from weightsync import __version__
from weightsync_client import Client, ClientError, RefusedError, Serving, ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(120)


def _tensors(seed: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((8, 4), float(seed), dtype=torch.bfloat16), "b": torch.zeros(3) + seed}


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="wsm") as name:
        yield Path(name)


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
    with serving_memory(folder, model) as client:
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
    command = [str(SERVER), *memory_flags(folder, model)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("weightsync-server: --model ")
    assert "Traceback" not in done.stderr


def test_a_part_is_based_on_the_checkpoint_that_is_served(folder: Path) -> None:
    model = folder / "model.safetensors"
    save_file(_tensors(1), model)
    log = folder / "log"
    with serving_memory(folder, model, log) as client:
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

        # The engine has `w` in bfloat16, and `b` in float32.
        masters = {name: tensor.double() / 3 for name, tensor in _tensors(4).items()}
        for way in ("auto", "never"):
            sent = client.push(masters, same_host=way, delta="never")
            assert sent.cast == 2
            _serves(client, sent.version, masters)
            masters["w"] += 1
        _serves(client, _pushed_in_parts(folder, masters), masters)
        _lacking_is_named(folder, masters)
    # What goes well gives nobody a reason to look.
    lines = [line.split(" ", 2)[2] for line in log.read_text().splitlines()]
    (warning,) = [line for line in lines if not line.startswith("INFO ")]
    assert "this is the engine for tests" in warning
    said = [line.partition(": ")[2] for line in lines if "weightsync.audit" not in line]
    assert said[0] == f"weightsync-server {__version__}, model default, store memory://"
    lives = [line.partition(";")[0] for line in said if " is live, " in line]
    first, second = pushed.version, again.version
    assert lives[:3] == [
        f"engine memory: version {live} is live, {before} before"
        for live, before in ((first, 1), (1, first), (second, 1))
    ]
    assert said[-1] == "stopped"


def _serves(client: Client, version: int, masters: dict[str, torch.Tensor]) -> None:
    assert client.apply(version).version == version
    assert client.verify().verified
    found = {tensor.name: tensor.torch() for tensor in client.tensors(version)}
    assert torch.equal(found["w"], masters["w"].bfloat16())
    assert torch.equal(found["b"], masters["b"].float())


def _pushed_in_parts(folder: Path, masters: dict[str, torch.Tensor]) -> int:
    """Push rows of `w` as two processes do, of which each has `b`; return the version."""
    versions = []

    def push(writer: int) -> None:
        rows = masters["w"][4 * writer : 4 * writer + 4]
        part = ShardedTensor((8, 4), "F64", [((4 * writer, 0), rows)])
        whole = ShardedTensor((3,), "F64", [((0,), masters["b"])], replica=writer > 0)
        with Client(f"unix:{folder}/server.sock") as client:
            pushed = client.push(
                {"w": part, "b": whole},
                writers=2,
                writer=writer,
                idempotency_key="parts",
                # Both layouts are told before a byte is sent.
                same_host="never",
                shard_bytes=1,
            )
            versions.append(pushed.version)
            assert pushed.cast == 2

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(push, range(2)))
    assert len(set(versions)) == 1
    return versions[0]


def _lacking_is_named(folder: Path, masters: dict[str, torch.Tensor]) -> None:
    """Push as two processes do, of which one lacks a tensor: that one is told which."""

    def push(writer: int, tensors: dict[str, torch.Tensor]) -> str:
        with Client(f"unix:{folder}/server.sock") as client, pytest.raises(ClientError) as caught:
            client.push(tensors, writers=2, writer=writer, idempotency_key="lacking")
        return caught.value.message

    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(push, range(2), (masters, {"w": masters["w"]})))
    assert "this process did not push" not in told[0]
    assert told[1].endswith("this process did not push tensor 'b' of the engine's")


def test_what_the_engine_refused_is_no_default_of_anything(folder: Path) -> None:
    model = folder / "model.safetensors"
    save_file(_tensors(1), model)
    with serving_memory(folder, model) as client:
        misfit = client.push({**_tensors(2), "other": torch.zeros(1)})
        with pytest.raises(RefusedError, match="push this model"):
            client.apply()
        shown = client.versions()[0]
        assert (shown.version, shown.serving) == (misfit.version, Serving.REJECTED)
        assert shown.rejected_reason.startswith("engine memory refused it: ")
        # The newest is the newest that it takes, which is live.
        assert client.apply().version == 1
        for seed in (2, 3):
            pushed = client.push({"w": _tensors(seed)["w"]}, partial=True)
            assert pushed.base_version == 1
            assert client.apply().version == pushed.version
            assert client.rollback().report.version == 1
