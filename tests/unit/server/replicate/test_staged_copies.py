"""Copies of staged versions: whole and proved, or not there at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.digest import tensor_digest
from weightsync.model.layout import build_header
from weightsync.model.manifest import Layout, Manifest, ShardEntry, TensorEntry
from weightsync.node.v1 import node_pb2 as pb
from weightsync.shm.segment_socket import SegmentClient, SegmentServer
from weightsync.shm.segments import MappedSegment
from weightsync.shm.staged_version import StagedVersion, document_of, read_document, shard_copy
from weightsync_server.replicate.node_server import StagedCopies

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator
    from pathlib import Path

_NAME = "0123456789abcdef"
_DATA = (bytes(range(200)), bytes(100))


class Head:
    """Answers ReadStaged from bytes in this process; a test changes them, or cuts them short."""

    def __init__(self) -> None:
        shards, tensors, self.shards = [], [], []
        for index, data in enumerate(_DATA):
            header, _ = build_header([(f"t{index}", "U8", (len(data),))])
            self.shards.append(len(header).to_bytes(8, "little") + header + data)
            shards.append(ShardEntry(f"s{index}", len(self.shards[-1]), len(header)))
            tensors.append(TensorEntry(f"t{index}", "U8", (len(data),), index, 0, len(data)))
        self.manifest = Manifest(
            Layout(tuple(shards), tuple(tensors)), tuple(map(tensor_digest, _DATA))
        )
        document = StagedVersion(self.manifest, ("slot-a", "slot-b")).to_segment()
        self.document = bytes(document.view)
        document.close()

    async def read(
        self, request: pb.ReadStagedRequest
    ) -> AsyncGenerator[pb.ReadStagedResponse, None]:
        assert request.name == _NAME
        data = self.shards[request.shard] if request.HasField("shard") else self.document
        for at in range(0, len(data), 64):
            yield pb.ReadStagedResponse(data=data[at : at + 64])


@pytest.fixture
def head() -> Head:
    return Head()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SegmentServer]:
    server = SegmentServer(tmp_path / "s.sock")
    yield server
    server.close()


@pytest.fixture
def copies(head: Head, server: SegmentServer) -> Iterator[StagedCopies]:
    copies = StagedCopies(server, head.read)
    yield copies
    copies.close()


def _request(head: Head) -> pb.StageVersion:
    return pb.StageVersion(name=_NAME, content_digest=head.manifest.content_digest)


def _found(server: SegmentServer, head: Head) -> list[bytes]:
    """Return the shards as a rank of this node reads them."""
    staged = read_document(str(server.path), _NAME)
    assert staged.manifest == head.manifest
    with SegmentClient(server.path) as client:
        mapped = [MappedSegment(*one) for one in client.map(staged.segments)]
    return [
        bytes(one.view[: shard.size])
        for one, shard in zip(mapped, staged.manifest.layout.shards, strict=True)
    ]


async def test_a_rank_finds_the_same_bytes_under_the_same_name(
    head: Head, server: SegmentServer, copies: StagedCopies
) -> None:
    await copies.stage(_request(head))
    assert _found(server, head) == head.shards
    # No name of a slot of the head is among them, and each is known to belong to the version.
    segments = read_document(str(server.path), _NAME).segments
    assert segments == (shard_copy(_NAME, 0), shard_copy(_NAME, 1))
    assert {document_of(segment) for segment in segments} == {_NAME}


async def test_what_is_forgotten_is_handed_out_no_more(
    head: Head, server: SegmentServer, copies: StagedCopies
) -> None:
    await copies.stage(_request(head))
    copies.forget(_NAME)
    assert not any(server.has(name) for name in (_NAME, shard_copy(_NAME, 0)))
    await copies.stage(_request(head))
    assert _found(server, head) == head.shards


@pytest.mark.parametrize("fault", ["byte", "short", "document", "content"])
async def test_what_is_not_the_version_is_refused_and_not_handed_out(
    head: Head, server: SegmentServer, copies: StagedCopies, fault: str
) -> None:
    request = _request(head)
    if fault == "byte":
        head.shards[1] = head.shards[1][:-1] + b"\x01"
    elif fault == "short":
        head.shards[0] = head.shards[0][:-1]
    elif fault == "document":
        head.document = b"nothing" * 20
    else:
        request.content_digest = "0" * 32
    with pytest.raises(WeightSyncError) as caught:
        await copies.stage(request)
    assert caught.value.reason is Reason.DATA_CORRUPT
    assert not any(server.has(name) for name in (_NAME, *(shard_copy(_NAME, at) for at in (0, 1))))


async def test_a_version_that_does_not_fit_is_refused_before_it_is_fetched(
    head: Head, server: SegmentServer, copies: StagedCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = head.manifest.layout.size - 1
    monkeypatch.setattr("weightsync_server.replicate.node_server.available_bytes", lambda: free)
    with pytest.raises(WeightSyncError) as caught:
        await copies.stage(_request(head))
    assert caught.value.reason is Reason.MEMORY_EXHAUSTED
    assert not server.has(_NAME)
