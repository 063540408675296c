"""The client against real servers, over real links, with both kinds of store."""

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

from tests.support.server_fixtures import RETRY, Relay, every_kind, ingested
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

# Six modules may share two cores, with other work beside.
pytestmark = pytest.mark.timeout(180)


def state(seed: int, count: int = 8, elements: int = 200_000) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layers.{i}.weight": torch.randn(elements, generator=generator).to(torch.bfloat16)
        for i in range(count)
    }


def newest(client: Client) -> int:
    """Return the version that was pushed last, by whichever test, or the engine's checkpoint."""
    # That has the number before there is an engine, too.
    return max((version.version for version in client.versions()), default=1)


def check_equal(client: Client, version: int, tensors: dict[str, torch.Tensor]) -> None:
    pulled = {t.name: t.torch() for t in client.tensors(version)}
    assert pulled.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(
            pulled[name].reshape(-1).view(torch.uint8),
            tensor.contiguous().reshape(-1).view(torch.uint8),
        )


@every_kind
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
    pushed = [third.version, second.version, first.version]
    assert [v.version for v in client.versions()][:3] == pushed
    assert pushed[0] == first.version + 2


def test_iterables_become_deltas_and_fall_back_midway(client: Client) -> None:
    tensors = state(2, elements=500_000)
    client.push(iter(tensors.items()), shard_bytes=1600 << 10)
    tensors["layers.6.weight"][::100] += 1
    second = client.push(iter(tensors.items()), shard_bytes=1600 << 10)
    assert second.kind is PushKind.DELTA
    check_equal(client, second.version, tensors)
    # The first tensors are on their way as a delta when the last one turns out to be another.
    tensors["layers.7.weight"] = tensors["layers.7.weight"].float()
    third = client.push(iter(tensors.items()), shard_bytes=1600 << 10)
    assert (third.kind, third.fallback_reason) == (PushKind.FULL, Fallback.LAYOUT_CHANGED)
    check_equal(client, third.version, tensors)
    tensors["layers.0.weight"][::100] += 1
    fourth = client.push(iter(tensors.items()), shard_bytes=1600 << 10)
    assert (fourth.kind, fourth.base_version) == (PushKind.DELTA, third.version)
    check_equal(client, fourth.version, tensors)


@ingested
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


@ingested
def test_37000_tensors(client: Client) -> None:
    values = torch.arange(37_000, dtype=torch.int32)
    result = client.push({f"model.layer.{i}": values[i : i + 1] for i in range(37_000)})
    assert result.tensor_count == 37_000
    pulled = b"".join(bytes(tensor.data) for tensor in client.tensors(result.version))
    assert pulled == values.numpy().tobytes()


@every_kind
def test_same_content_is_fine_other_content_is_not(client: Client) -> None:
    version = newest(client) + 8
    first = client.push(state(1, 2), version=version)
    again = client.push(state(1, 2), version=version)
    assert (again.already, again.content_digest) == (True, first.content_digest)
    with pytest.raises(RefusedError) as caught:
        client.push(state(2, 2), version=version)
    assert caught.value.reason is Reason.VERSION_CONFLICT
    with pytest.raises(RefusedError) as caught:
        client.push(state(3, 2), version=version - 1)
    assert caught.value.reason is Reason.VERSION_NOT_ABOVE
    listed = [v.version for v in client.versions()]
    assert (listed[0], listed.count(version)) == (version, 1)
    assert client.status().models[0].pushes == ()


def test_a_stale_writer_is_refused(client: Client) -> None:
    old = client.acquire_epoch("old")
    new = client.acquire_epoch("new")
    with pytest.raises(RefusedError) as caught:
        client.push(state(1, 1), epoch=old)
    assert caught.value.reason is Reason.EPOCH_STALE
    before = newest(client)
    assert client.push(state(1, 1), epoch=new).version == before + 1


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


def test_the_command_says_how_to_unpin(server: WeightSyncServer, client: Client) -> None:
    version = client.push(state(1, 1)).version
    client.pin(version)
    done = subprocess.run(
        [sys.executable, "-m", "weightsync_client.cli", "delete", str(version)],
        env=os.environ | {"WEIGHTSYNC_ADDRESS": server.address},
        capture_output=True,
        text=True,
        check=False,
    )
    client.pin(version, pinned=False)
    assert (done.returncode, "with `weightsync pin --undo`" in done.stderr) == (4, True)


def test_without_http_a_server_loads_neither_the_verbs_nor_numpy(tmp_path: Path) -> None:
    server = WeightSyncServer(tmp_path / "run", tmp_path / "state", store="memory://").start()
    try:
        assert server.process is not None
        assert "numpy" not in Path(f"/proc/{server.process.pid}/maps").read_text()
    finally:
        server.stop()


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


@every_kind
def test_pin_delete_watch(client: Client) -> None:
    first = client.push(state(1, 1)).version
    watch = client.watch()
    while not (change := next(watch)).initial or change.version.version != first:
        pass
    second = client.push(state(2, 1)).version
    committed = second, Durability.COMMITTED
    while ((seen := next(watch).version).version, seen.durability) != committed:
        pass
    assert client.pin(first).pinned
    with pytest.raises(RefusedError):
        client.delete(first)
    client.pin(first, pinned=False)
    client.delete(first)
    while not (change := next(watch)).deleted or change.version.version != first:
        pass
    with pytest.raises(NotFoundError):
        client.get_version(first)
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
        version = client.push(tensors).version
        relay.cut_after = [relay._passed + 3_000_000]
        result = client.pull(tmp_path / "out", version)
        assert relay.cuts == 1
        loaded = load_file(result.files[0])
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_an_abort_by_someone_else_ends_the_push(client: Client) -> None:
    before = newest(client)
    gate = threading.Event()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in state(5, 4).items():
            if name.startswith("layers.2"):
                gate.wait(60)
            yield name, tensor

    handle = client.push_async(tensors(), shard_bytes=400_000)
    while not (pushes := client.status().models[0].pushes):
        time.sleep(0.02)
    client.abort(pushes[0].push_id)
    gate.set()
    with pytest.raises(WeightSyncError) as caught:
        handle.committed.result(60)
    assert caught.value.reason is Reason.PUSH_ABORTED
    assert newest(client) == before


def test_a_cancelled_push_leaves_nothing(client: Client) -> None:
    before = newest(client)
    reached, gate = threading.Event(), threading.Event()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(1000)
        yield "b", torch.zeros(1000)
        reached.set()
        gate.wait(60)
        yield "c", torch.zeros(1000)

    handle = client.push_async(tensors(), shard_bytes=4000)
    assert reached.wait(60)
    handle.cancel()
    gate.set()
    with pytest.raises(AbortedError):
        handle.committed.result(60)
    status = client.status().models[0]
    assert status.pushes == ()
    assert newest(client) == before


def test_a_push_outlives_a_crash_of_the_server(file_server: WeightSyncServer) -> None:
    tensors = state(6, 30, 1_000_000)
    reached = threading.Event()

    def progress(done: int, _total: int) -> None:
        if done > 20_000_000:
            reached.set()
            # A source that is slower than the crash.
            time.sleep(0.01)

    with Client(file_server.address, model="default", retry=RETRY) as client:
        first = client.push(state(1, 1)).version
        handle = client.push_async(tensors, shard_bytes=4_000_000, on_progress=progress)
        assert reached.wait(60)
        file_server.kill()
        file_server.start()
        result = handle.committed.result(60)
        assert result.version == first + 1
        check_equal(client, result.version, tensors)


def test_shards_in_the_store_are_what_was_pushed(
    server: WeightSyncServer, client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "w.safetensors"
    save_file(state(7), path, {"format": "pt"})
    version = client.push(path).version
    (stored,) = (server.state_dir / f"store/default/v{version}").glob("*.safetensors")
    assert stored.read_bytes() == path.read_bytes()


def test_damage_in_the_store_is_data_loss(file_server: WeightSyncServer, tmp_path: Path) -> None:
    with Client(file_server.address, retry=RETRY) as client:
        version = client.push(state(8, 1)).version
        (stored,) = file_server.state_dir.rglob("*.safetensors")
        data = bytearray(stored.read_bytes())
        data[-1] ^= 1
        stored.chmod(0o600)
        stored.write_bytes(data)
        # Where it still lies in memory, it is pulled from there, whole.
        if client.get_version(version).residency is Residency.STAGED:
            assert len(client.pull(tmp_path / "whole", version).files) == 1
    file_server.stop()
    file_server.start()
    with (
        Client(file_server.address, retry=RETRY) as client,
        pytest.raises(DataError),
    ):
        client.pull(tmp_path / "out", version)
    assert not (tmp_path / "out").exists()


@ingested
async def test_asyncio(server: WeightSyncServer, tmp_path: Path) -> None:
    tensors = state(9, 4)
    async with AsyncClient(server.address) as client:
        pushed = await client.push(tensors, streams=2, shard_bytes=400_000)
        result = await client.pull(tmp_path / "out", pushed.version)
        names = [t.name async for t in client.tensors(pushed.version)]
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

    # Another test's run has taken the epoch, and pushed under it.
    assert run("epoch").returncode == 0
    path = tmp_path / "m.safetensors"
    save_file(state(10, 2), path)
    pushed = run("push", path, "--json")
    assert (pushed.returncode, pushed.stderr) == (0, "")
    version = json.loads(pushed.stdout)["version"]
    assert run("status", "--exit-code", "--service", "push").returncode == 0
    assert run("status", "--exit-code", "--service", "serving").returncode == 5
    assert json.loads(run("versions", "--json").stdout)[0]["tensor_count"] == 2
    assert run("pull", tmp_path / "out", version).returncode == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == path.read_bytes()
    assert run("apply").returncode == 5
    assert run("pull", tmp_path / "none", version + 9).returncode == 3
    assert run("versions", "--model", "nobody").returncode == 3
    other = tmp_path / "other.safetensors"
    save_file({"x": torch.from_numpy(np.ones(3))}, other)
    refused = run("push", other, "--version", version)
    assert refused.returncode == 4
    assert refused.stderr.count("\n") == 1
