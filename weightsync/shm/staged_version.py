"""A staged version as other processes read it: its manifest and the segment of each shard.

The document lies in a segment of its own, because RPC arguments to workers are ids only.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from weightsync.model.manifest import Manifest
from weightsync.shm.segment_socket import SegmentClient
from weightsync.shm.segments import MappedSegment, Segment

__all__ = ["StagedVersion", "read_document"]

_HEAD = struct.Struct("<8sII")
_MAGIC = b"WSSTAGE2"


@dataclass(frozen=True)
class StagedVersion:
    """Where the bytes of a version lie in shared memory.

    Attributes:
        manifest: What the bytes must be.
        segments: Segment id of each shard, in the order of the manifest's shards.
    """

    manifest: Manifest
    segments: tuple[str, ...]

    def to_segment(self) -> Segment:
        """Write the document into a new segment, which the caller owns."""
        ids = ",".join(self.segments).encode()
        body = self.manifest.to_json()
        head = _HEAD.pack(_MAGIC, len(ids), len(body)) + ids
        segment = Segment.create(len(head) + len(body))
        segment.fill(0, head)
        segment.fill(len(head), body)
        return segment

    @classmethod
    def from_view(cls, view: memoryview) -> StagedVersion:
        """Read what `to_segment` wrote.

        Raises:
            ValueError: The memory holds no such document.
        """
        magic, ids_size, body_size = _HEAD.unpack_from(view)
        end = _HEAD.size + ids_size
        if magic != _MAGIC or end + body_size > len(view):
            raise ValueError("not a staged version")
        ids = bytes(view[_HEAD.size : end]).decode()
        manifest = Manifest.from_json(view[end : end + body_size])
        segments = tuple(ids.split(","))
        if len(segments) != len(manifest.layout.shards):
            raise ValueError(f"{len(segments)} segments for {len(manifest.layout.shards)} shards")
        return cls(manifest, segments)


def read_document(socket: str, document: str) -> StagedVersion:
    """Return the staged version that a document segment describes.

    Raises:
        OSError: Nobody listens on the segment socket.
        LookupError: The server has no such document.
    """
    with SegmentClient(socket) as client:
        ((fd, size),) = client.map([document])
    mapped = MappedSegment(fd, size)
    staged = StagedVersion.from_view(mapped.view)
    # Not in a `finally`: the traceback of a failure holds views, and closing would hide the reason.
    mapped.close()
    return staged
