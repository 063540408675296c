"""Copies of the head's staged versions in memory of this node, each proved before it is handed out.

A copy is written once: memory that a rank may map is never given another content.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.free_memory import available_bytes
from weightsync.model.digest import tensor_digest
from weightsync.node.v1 import node_pb2 as pb
from weightsync.shm.segments import Segment
from weightsync.shm.staged_version import StagedVersion, shard_copy
from weightsync_server.ops.tasks import all_done, in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from weightsync.model.manifest import Manifest
    from weightsync.shm.segment_socket import SegmentServer

    #: Streams what ReadStaged answers.
    Read = Callable[[pb.ReadStagedRequest], AsyncIterator[pb.ReadStagedResponse]]

__all__ = ["StagedCopies"]

#: Shards under way at once.
_AT_ONCE = 4
#: Most that a document may have, bytes.
_MAX_DOCUMENT = 1 << 30


class StagedCopies:
    """Makes copies and publishes them on this node's segment socket.

    Args:
        server: The segment socket.
        read: Asks the head for bytes.
    """

    def __init__(self, server: SegmentServer, read: Read) -> None:
        self._server = server
        self._read = read
        self._owned: dict[str, list[tuple[str, Segment]]] = {}
        self._gate = asyncio.Semaphore(_AT_ONCE)

    async def stage(self, request: pb.StageVersion) -> None:
        """Return when a version lies here, proved, and ranks find it under its name.

        Raises:
            WeightSyncError: DATA_CORRUPT, MEMORY_EXHAUSTED, SERVER_AWAY, VERSION_UNKNOWN; nothing
                of it lies here.
        """
        await failpoints.reach("node.stage")
        name = request.name
        staged = await self._document(name)
        manifest = staged.manifest
        # What a layout is checked by has names and no bytes.
        shards = range(len(manifest.layout.shards)) if any(staged.segments) else range(0)
        if shards:
            _check_content(name, manifest, request.content_digest)
            _check_room(manifest)
        segments: dict[int, Segment] = {}
        copies = tuple(shard_copy(name, at) for at in shards) or staged.segments
        try:
            await all_done([self._shard(name, manifest, at, segments) for at in shards])
            document = await in_thread(StagedVersion(manifest, copies).to_segment)
        except BaseException:
            for segment in segments.values():
                segment.close()
            raise
        await failpoints.reach("node.staged")
        self._publish(name, [*((copies[at], segments[at]) for at in shards), (name, document)])

    def forget(self, name: str) -> None:
        """Hand a version out no more; its memory is free when no rank maps it."""
        for published, segment in self._owned.pop(name, ()):
            self._server.withdraw(published)
            segment.close()

    def close(self) -> None:
        """Forget all of them."""
        for name in list(self._owned):
            self.forget(name)

    def _publish(self, name: str, segments: list[tuple[str, Segment]]) -> None:
        self.forget(name)
        self._owned[name] = segments
        # The document last: whoever reads it finds the rest.
        for published, segment in segments:
            self._server.publish(published, segment.read_only_fd(), segment.capacity)

    async def _document(self, name: str) -> StagedVersion:
        data = bytearray()
        async for message in self._read(pb.ReadStagedRequest(name=name)):
            data += message.data
            if len(data) > _MAX_DOCUMENT:
                raise _corrupt(f"the document of {name} has over {_MAX_DOCUMENT} bytes")
        try:
            return await in_thread(StagedVersion.from_view, memoryview(bytes(data)))
        except ValueError as error:
            raise _corrupt(f"the document of {name} cannot be read ({error})") from error

    async def _shard(
        self, name: str, manifest: Manifest, index: int, segments: dict[int, Segment]
    ) -> None:
        size = manifest.layout.shards[index].size
        async with self._gate:
            segment = segments[index] = await in_thread(Segment.create, size)
            at = 0
            request = pb.ReadStagedRequest(name=name, shard=index)
            async with contextlib.aclosing(_bytes(self._read(request))) as chunks:
                async for chunk in chunks:
                    await failpoints.reach("node.chunk")
                    piece = chunk[: size - at]
                    segment.fill(at, piece)
                    at += len(piece)
                    if at == size:
                        break
            if at < size:
                raise _corrupt(f"shard {index} of {name} has {at} bytes, not {size}")
            if wrong := await in_thread(_wrong_tensor, manifest, index, segment):
                raise _corrupt(f"tensor {wrong} of {name} has another digest than its manifest")


async def _bytes(messages: AsyncIterator[pb.ReadStagedResponse]) -> AsyncGenerator[bytes]:
    async for message in messages:
        yield message.data


def _wrong_tensor(manifest: Manifest, index: int, segment: Segment) -> str:
    """Return the name of a tensor whose bytes are not what the manifest tells; "": all are."""
    layout, start = manifest.layout, manifest.layout.shards[index].data_start
    for tensor, digest in zip(layout.tensors, manifest.digests, strict=True):
        if tensor.shard != index:
            continue
        if tensor_digest(segment.view[start + tensor.begin : start + tensor.end]) != digest:
            return tensor.name
    return ""


def _check_content(name: str, manifest: Manifest, expected: str) -> None:
    if expected and manifest.content_digest != expected:
        raise _corrupt(f"the document of {name} is of content {manifest.content_digest}")


def _check_room(manifest: Manifest) -> None:
    size, free = manifest.layout.size, available_bytes()
    if size > free:
        raise WeightSyncError(
            Reason.MEMORY_EXHAUSTED,
            f"a version of {size} bytes and {free} bytes of memory left; free memory on this node",
        )


def _corrupt(what: str) -> WeightSyncError:
    return WeightSyncError(Reason.DATA_CORRUPT, f"{what}; it is asked for again at the next apply")
