"""The client against a real server, over real links, with both kinds of store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.server_fixtures import RETRY, Relay
from tests.support.weightsync_server import WeightSyncServer
from weightsync_client import (
    AbortedError,
    AsyncClient,
    Client,
    DataError,
    Durability,
    Fallback,
    NotFoundError,
    PushKind,
    Reason,
    RefusedError,
    Residency,
    UnavailableError,
    WeightSyncError,
)

#: Version 1 is the engine's checkpoint, also before there is an engine.
FIRST = 2


def state(seed: int, count: int = 8, elements: int = 200_000) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layers.{i}.weight": torch.randn(elements, generator=generator).to(torch.bfloat16)
        for i in range(count)
    }


def check_equal(client: Client, version: int, tensors: dict[str, torch.Tensor]) -> None:
    pulled = {t.name: t.torch() for t in client.tensors(version)}
    assert pulled.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(
            pulled[name].reshape(-1).view(torch.uint8),
            tensor.contiguous().reshape(-1).view(torch.uint8),
        )


def test_pushes_come_back_bit_for_bit(
    client: Client, server: WeightSyncServer, tmp_path: Path
) -> None:
    tensors = state(1)
    first = client.push(tensors, shard_bytes=1_000_000, metadata={"step": "1"})
    assert first.durable == (server.store == "")
    check_equal(client, first.version, tensors)
    # The same tensors in another encoding are the same content.
    second = client.push(iter(tensors.items()), streams=3, shard_bytes=500_000, delta="never")
    assert second.version == first.version + 1
    assert second.content_digest == first.content_digest
    assert second.manifest_digest != first.manifest_digest
    pulled = client.pull(tmp_path / "out", first.version)
    third = client.push(tmp_path / "out", streams=2)
    assert third.content_digest == first.content_digest
    assert len(pulled.files) == 4
    info = client.get_version(first.version)
    assert info.metadata == {"step": "1"}
    assert info.durability is Durability.COMMITTED
    assert info.trainer_verified
    assert [v.version for v in client.versions()] == [FIRST + 2, FIRST + 1, FIRST]


def test_iterables_become_deltas_and_fall_back_midway(client: Client) -> None:
    tensors = state(2, elements=5_000_000)
    client.push(iter(tensors.items()), shard_bytes=16 << 20)
    tensors["layers.6.weight"][::100] += 1
    second = client.push(iter(tensors.items()), shard_bytes=16 << 20)
    assert second.kind is PushKind.DELTA
    check_equal(client, second.version, tensors)
    # The first tensors are on their way as a delta when the last one turns out to be another.
    tensors["layers.7.weight"] = tensors["layers.7.weight"].float()
    third = client.push(iter(tensors.items()), shard_bytes=16 << 20)
    assert (third.kind, third.fallback_reason) == (PushKind.FULL, Fallback.LAYOUT_CHANGED)
    check_equal(client, third.version, tensors)
    tensors["layers.0.weight"][::100] += 1
    fourth = client.push(iter(tensors.items()), shard_bytes=16 << 20)
    assert (fourth.kind, fourth.base_version) == (PushKind.DELTA, third.version)
    check_equal(client, fourth.version, tensors)


def test_every_kind_of_tensor(client: Client) -> None:
    tensors: dict[str, torch.Tensor] = {
        "empty": torch.zeros(0, 7),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "one byte": torch.tensor([7], dtype=torch.uint8),
        "flag": torch.tensor([True, False]),
        "fp8": torch.randn(33).to(torch.float8_e4m3fn),
        "scale": torch.ones(5).to(torch.float8_e8m0fnu),
        "strided": torch.randn(40, 30).T,
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "last empty": torch.zeros(0, dtype=torch.int64),
        "complex": torch.randn(3, dtype=torch.complex64),
    }
    tensors["tied"] = tensors["strided"]
    result = client.push(tensors)
    check_equal(client, result.version, tensors)


def test_37000_tensors(client: Client) -> None:
    values = torch.arange(37_000, dtype=torch.int32)
    result = client.push({f"model.layer.{i}": values[i : i + 1] for i in range(37_000)})
    assert result.tensor_count == 37_000
    assert sum(int(t.torch()) for t in client.tensors(result.version)) == int(values.sum())


def test_same_content_is_fine_other_content_is_not(client: Client) -> None:
    first = client.push(state(1, 2), version=10)
    again = client.push(state(1, 2), version=10)
    assert (again.already, again.content_digest) == (True, first.content_digest)
    with pytest.raises(RefusedError) as caught:
        client.push(state(2, 2), version=10)
    assert caught.value.reason is Reason.VERSION_CONFLICT
    with pytest.raises(RefusedError) as caught:
        client.push(state(3, 2), version=9)
    assert caught.value.reason is Reason.VERSION_NOT_ABOVE
    assert [v.version for v in client.versions()] == [10]
    assert client.status().models[0].pushes == ()


def test_a_stale_writer_is_refused(client: Client) -> None:
    old = client.acquire_epoch("old")
    new = client.acquire_epoch("new")
    with pytest.raises(RefusedError) as caught:
        client.push(state(1, 1), epoch=old)
    assert caught.value.reason is Reason.EPOCH_STALE
    assert client.push(state(1, 1), epoch=new).version == FIRST


def test_an_unknown_model_is_named(server: WeightSyncServer) -> None:
    with (
        Client(server.address, model="nobody") as client,
        pytest.raises(NotFoundError, match="default") as caught,
    ):
        client.push(state(1, 1))
    assert caught.value.reason is Reason.MODEL_UNKNOWN


def test_apply_without_an_engine(client: Client) -> None:
    client.push(state(1, 1))
    with pytest.raises(UnavailableError) as caught:
        client.apply()
    assert caught.value.reason is Reason.ENGINE_AWAY
    assert client.health("push")
    assert not client.health("serving")


def test_the_command_says_how_to_unpin(file_server: WeightSyncServer) -> None:
    with Client(file_server.address) as client:
        client.push(state(1, 1))
        client.pin(FIRST)
    done = subprocess.run(
        [sys.executable, "-m", "weightsync_client.cli", "delete", str(FIRST)],
        env=os.environ | {"WEIGHTSYNC_ADDRESS": file_server.address},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "with `weightsync pin --undo`" in done.stderr) == (4, True)


def test_the_command_names_the_health_services(server: WeightSyncServer) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "weightsync_client.cli", "status", "--service", "nonsense"],
        env=os.environ | {"WEIGHTSYNC_ADDRESS": server.address},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert "no health service 'nonsense'" in line
    assert "'push' or 'serving'" in line


def test_pin_delete_watch(client: Client) -> None:
    client.push(state(1, 1))
    watch = client.watch()
    assert next(watch).version.version == FIRST
    client.push(state(2, 1))
    while (change := next(watch)).version.durability is not Durability.COMMITTED:
        pass
    assert change.version.version == FIRST + 1
    assert client.pin(FIRST).pinned
    with pytest.raises(RefusedError):
        client.delete(FIRST)
    client.pin(FIRST, pinned=False)
    client.delete(FIRST)
    for change in watch:
        if change.deleted:
            break
    assert change.version.version == FIRST
    with pytest.raises(NotFoundError):
        client.get_version(FIRST)
    watch.close()


@pytest.mark.parametrize("kind", ["state", "iterable", "path"])
@pytest.mark.parametrize("streams", [1, 3])
def test_a_cut_link_is_taken_up(relay: Relay, kind: str, streams: int, tmp_path: Path) -> None:
    tensors = state(3, 12, 500_000)
    source: Any = tensors if kind == "state" else iter(tensors.items())
    if kind == "path":
        for name, tensor in tensors.items():
            save_file({name: tensor}, tmp_path / f"{name}.safetensors")
        source = tmp_path
    with Client(relay.address, retry=RETRY) as client:
        client.status()
        relay.cut_after = [2_000_000, 5_000_000, 9_000_000]
        result = client.push(source, streams=streams, shard_bytes=2_500_000, chunk_bytes=1 << 18)
        assert relay.cuts == 3
        check_equal(client, result.version, tensors)
        # Bytes that arrived are not sent again.
        assert result.sent_bytes < result.size_bytes + 3 * 8_000_000


def test_a_cut_pull_is_taken_up(relay: Relay, tmp_path: Path) -> None:
    tensors = state(4, 12, 500_000)
    with Client(relay.address, retry=RETRY) as client:
        client.push(tensors)
        relay.cut_after = [relay._passed + 3_000_000]
        result = client.pull(tmp_path / "out", FIRST)
        assert relay.cuts == 1
        loaded = load_file(result.files[0])
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_an_abort_by_someone_else_ends_the_push(client: Client) -> None:
    gate = threading.Event()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in state(5, 4).items():
            if name.startswith("layers.2"):
                gate.wait(10)
            yield name, tensor

    handle = client.push_async(tensors(), shard_bytes=400_000)
    while not (pushes := client.status().models[0].pushes):
        time.sleep(0.02)
    client.abort(pushes[0].push_id)
    gate.set()
    with pytest.raises(WeightSyncError) as caught:
        handle.committed.result(20)
    assert caught.value.reason is Reason.PUSH_ABORTED
    assert client.versions() == []


def test_a_cancelled_push_leaves_nothing(client: Client) -> None:
    gate = threading.Event()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(1000)
        gate.wait(10)
        yield "b", torch.zeros(1000)

    handle = client.push_async(tensors(), shard_bytes=4000)
    time.sleep(0.2)
    handle.cancel()
    gate.set()
    with pytest.raises(AbortedError):
        handle.committed.result(10)
    status = client.status().models[0]
    assert status.pushes == ()
    assert client.versions() == []


def test_a_push_outlives_a_crash_of_the_server(file_server: WeightSyncServer) -> None:
    tensors = state(6, 30, 1_000_000)
    reached = threading.Event()

    def progress(done: int, _total: int) -> None:
        if done > 20_000_000:
            reached.set()
            # A source that is slower than the crash.
            time.sleep(0.01)

    with Client(file_server.address, model="default", retry=RETRY) as client:
        client.push(state(1, 1))
        handle = client.push_async(tensors, shard_bytes=4_000_000, on_progress=progress)
        assert reached.wait(20)
        file_server.kill()
        file_server.start()
        result = handle.committed.result(40)
        assert result.version == FIRST + 1
        check_equal(client, FIRST + 1, tensors)


def test_shards_in_the_store_are_what_was_pushed(
    file_server: WeightSyncServer, tmp_path: Path
) -> None:
    path = tmp_path / "w.safetensors"
    save_file(state(7), path, {"format": "pt"})
    with Client(file_server.address) as client:
        client.push(path)
    (stored,) = file_server.state_dir.rglob("*.safetensors")
    assert stored.read_bytes() == path.read_bytes()


def test_damage_in_the_store_is_data_loss(file_server: WeightSyncServer, tmp_path: Path) -> None:
    with Client(file_server.address, retry=RETRY) as client:
        client.push(state(8, 1))
        (stored,) = file_server.state_dir.rglob("*.safetensors")
        data = bytearray(stored.read_bytes())
        data[-1] ^= 1
        stored.chmod(0o600)
        stored.write_bytes(data)
        # Where it still lies in memory, it is pulled from there, whole.
        if client.get_version(FIRST).residency is Residency.STAGED:
            assert len(client.pull(tmp_path / "whole", FIRST).files) == 1
    file_server.stop()
    file_server.start()
    with (
        Client(file_server.address, retry=RETRY) as client,
        pytest.raises(DataError),
    ):
        client.pull(tmp_path / "out", FIRST)
    assert not (tmp_path / "out").exists()


async def test_asyncio(server: WeightSyncServer, tmp_path: Path) -> None:
    tensors = state(9, 4)
    async with AsyncClient(server.address) as client:
        pushed = await client.push(tensors, streams=2, shard_bytes=400_000)
        assert pushed.version == FIRST
        result = await client.pull(tmp_path / "out", FIRST)
        names = [t.name async for t in client.tensors(FIRST)]
        assert names == list(tensors)
        assert len(result.files) == 4
        assert (await client.versions())[0].content_digest == pushed.content_digest
        watch = client.watch()
        assert (await anext(watch)).initial
        await watch.aclose()


def test_the_command(server: WeightSyncServer, tmp_path: Path) -> None:
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "weightsync_client.cli", *map(str, arguments)],
            env={**os.environ, "WEIGHTSYNC_ADDRESS": server.address},
            capture_output=True,
            text=True,
            check=False,
        )

    path = tmp_path / "m.safetensors"
    save_file(state(10, 2), path)
    pushed = run("push", path, "--json")
    assert (pushed.returncode, pushed.stderr) == (0, "")
    assert json.loads(pushed.stdout)["version"] == FIRST
    assert run("status", "--exit-code", "--service", "push").returncode == 0
    assert run("status", "--exit-code", "--service", "serving").returncode == 5
    assert json.loads(run("versions", "--json").stdout)[0]["tensor_count"] == 2
    assert run("pull", tmp_path / "out", FIRST).returncode == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == path.read_bytes()
    assert run("apply").returncode == 5
    assert run("pull", tmp_path / "none", "9").returncode == 3
    assert run("versions", "--model", "nobody").returncode == 3
    other = tmp_path / "other.safetensors"
    save_file({"x": torch.from_numpy(np.ones(3))}, other)
    refused = run("push", other, "--version", FIRST)
    assert refused.returncode == 4
    assert refused.stderr.count("\n") == 1
