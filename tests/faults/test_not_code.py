"""Shards that hold programs: they are refused as data, and nothing of them runs (attack A11)."""

from __future__ import annotations

import io
import pickle
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tests.support.weightsync_server import WeightSyncServer
from weightsync.v1 import weightsync_pb2 as pb

HEADER = b'{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}'


class _Canary:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


def _payloads(canary: Path) -> dict[str, bytes]:
    pickled = pickle.dumps(_Canary(canary))
    archive, arrays = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        # As torch.save lays it out.
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/version", "3\n")
    np.savez(arrays, a=np.array([_Canary(canary)], dtype=object), allow_pickle=True)
    return {
        "pickle": pickled,
        "old pickle": pickle.dumps(_Canary(canary), protocol=0),
        "torch": archive.getvalue(),
        "npz": arrays.getvalue(),
        "elf": Path("/bin/true").read_bytes()[:20_000],
        "script": f"#!/bin/sh\ntouch {canary}\n".encode(),
        # A length that fits, and a program where the header belongs.
        "headed": len(pickled).to_bytes(8, "little") + pickled,
    }


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="wsn"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[WeightSyncServer]:
    server = WeightSyncServer(folder / "run", folder / "state").start()
    yield server
    assert server.stop() == 0


def _messages(data: bytes) -> Iterator[pb.PushWeightsRequest]:
    """Push bytes with a layout that fits their size, as an attacker would."""
    data += bytes(max(0, 200 - len(data)))
    size = next(n for n in range(len(data), 0, -1) if 8 + len(HEADER % (n, n)) + n == len(data))
    header_bytes = len(HEADER % (size, size))
    part = pb.LayoutPart(
        shard=0,
        shard_name="model.safetensors",
        size_bytes=len(data),
        header_bytes=header_bytes,
        last=True,
    )
    part.tensors.add(name="a", dtype="U8", shape=[size], begin=0, end=size)
    begin = pb.BeginPushRequest(model="default", shard_count=1)
    yield pb.PushWeightsRequest(begin=begin)
    yield pb.PushWeightsRequest(layout=part)
    yield pb.PushWeightsRequest(chunk=pb.Chunk(shard=0, offset=0, data=data))
    yield pb.PushWeightsRequest(commit=pb.CommitPushRequest())


@pytest.mark.parametrize("name", list(_payloads(Path("/none"))))
def test_a_program_is_no_shard(server: WeightSyncServer, folder: Path, name: str) -> None:
    canary = folder / f"canary {name}"
    with pytest.raises(grpc.RpcError) as caught:
        server.stub.PushWeights(_messages(_payloads(canary)[name]), timeout=20)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not canary.exists()
    assert not server.stub.ListVersions(pb.ListVersionsRequest(model="default")).versions


def test_the_canary_sings_when_it_is_unpickled(folder: Path) -> None:
    # Else the tests above could not fail.
    canary = folder / "sung"
    pickle.loads(_payloads(canary)["pickle"])
    assert canary.exists()


def test_weights_are_pushed_the_same_way(server: WeightSyncServer) -> None:
    size = 300
    header = HEADER % (size, size)
    data = len(header).to_bytes(8, "little") + header + bytes(size)
    reply = server.stub.PushWeights(_messages(data), timeout=20)
    assert reply.commit.tensor_count == 1
    delete = pb.DeleteVersionRequest(model="default", version=reply.version)
    server.stub.DeleteVersion(delete, timeout=10)
