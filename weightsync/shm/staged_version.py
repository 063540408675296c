"""A staged version as other processes read it: its manifest and the segment of each shard.

The document lies in a segment of its own, because RPC arguments to workers are ids only. Its layout
lies apart from the digests: most versions have the one that was read before, and reading tens of
thousands of tensors keeps the GIL from a thread that generates.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from weightsync.model.manifest import Layout, Manifest, ShardEntry, TensorEntry
from weightsync.shm.segment_socket import SegmentClient
from weightsync.shm.segments import MappedSegment, Segment

#: Magic, the layout's digest, bytes of the ids, of the layout, of all digests and of each.
_HEAD = struct.Struct("<8s32sIQQI")
_MAGIC = b"WSSTAGE3"
#: Documents that a process keeps: of what is live, what comes next, and what was before.
_KEPT = 4


@dataclass(frozen=True)
class StagedVersion:
    """Where the bytes of a version lie; `segments` has the segment id of each shard."""

    manifest: Manifest
    segments: tuple[str, ...]

    @classmethod
    def without_bytes(cls, tensors: Sequence[TensorEntry]) -> StagedVersion:
        """Return what tensors of a version are; what their bytes will be is not known yet."""
        layout = Layout((ShardEntry("", 0, 0),), tuple(replace(t, shard=0) for t in tensors))
        return cls(Manifest(layout, (b"",) * len(tensors)), ("",))

    def to_segment(self) -> Segment:
        """Write the document into a new segment, which the caller owns."""
        manifest = self.manifest
        ids = ",".join(self.segments).encode()
        layout, digests = manifest.layout.to_json(), b"".join(manifest.digests)
        each = len(digests) // max(1, len(manifest.digests))
        sizes = len(ids), len(layout), len(digests), each
        parts = _HEAD.pack(_MAGIC, manifest.layout.digest.encode(), *sizes), ids, layout, digests
        segment = Segment.create(sum(map(len, parts)))
        at = 0
        for part in parts:
            segment.fill(at, part)
            at += len(part)
        return segment

    @classmethod
    def from_view(
        cls, view: memoryview, known: Callable[[str], Layout | None] | None = None
    ) -> StagedVersion:
        """Read what `to_segment` wrote, or raise ValueError.

        `known` returns the layout of a digest that was read before.
        """
        digest, ids_size, layout_size, digests_size, each = _read_head(view)
        ids_end = _HEAD.size + ids_size
        layout_end = ids_end + layout_size
        end = layout_end + digests_size
        segments = _read_ids(view, ids_size)
        name = digest.decode()
        layout = known(name) if known is not None else None
        layout = layout or Layout.from_json(view[ids_end:layout_end])
        count = len(layout.tensors)
        if count * each != digests_size:
            raise ValueError(f"{digests_size} bytes of digests for {count} tensors")
        if len(segments) != len(layout.shards):
            raise ValueError(f"{len(segments)} segments for {len(layout.shards)} shards")
        whole = bytes(view[layout_end:end])
        digests = tuple(whole[at * each : (at + 1) * each] for at in range(count))
        return cls(Manifest(layout, digests), segments)

    @staticmethod
    def segments_in(view: memoryview) -> tuple[str, ...]:
        """Read the ids alone, which takes no longer where there are thousands of tensors."""
        _, ids_size, *_ = _read_head(view)
        return _read_ids(view, ids_size)


def _read_head(view: memoryview) -> tuple[bytes, int, int, int, int]:
    if len(view) < _HEAD.size:
        raise ValueError("not a staged version")
    magic, digest, ids_size, layout_size, digests_size, each = _HEAD.unpack_from(view)
    end = _HEAD.size + ids_size + layout_size + digests_size
    if magic != _MAGIC or end > len(view):
        raise ValueError("not a staged version")
    return digest, ids_size, layout_size, digests_size, each


def _read_ids(view: memoryview, size: int) -> tuple[str, ...]:
    return tuple(bytes(view[_HEAD.size : _HEAD.size + size]).decode().split(","))


def shard_copy(document: str, shard: int) -> str:
    """Return the segment id of a shard's copy, the same on every other node.

    `document` is the id of the document where the version was staged first.
    """
    return f"{document}/{shard}"


def document_of(segment: str) -> str:
    """Return the document of the version that a segment is a copy for; else the segment itself."""
    return segment.partition("/")[0]


def read_document(
    socket: str, document: str, known: Callable[[str], Layout | None] | None = None
) -> StagedVersion:
    """Return the staged version of a document segment; `known` is as in `from_view`.

    Raises OSError when nobody listens on the socket, LookupError when the server has no such
    document.
    """
    with SegmentClient(socket) as client:
        ((fd, size),) = client.map([document])
    mapped = MappedSegment(fd, size)
    staged = StagedVersion.from_view(mapped.view, known)
    # Not in a `finally`: the traceback of a failure holds views, and closing would hide the reason.
    mapped.close()
    return staged


class StagedDocuments:
    """Reads documents, and layouts that several share, once each; any thread may read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By the id of the document's segment, which is never used again; the last one last.
        self._read: dict[str, StagedVersion] = {}

    def read(self, socket: str, document: str) -> StagedVersion:
        with self._lock:
            staged = self._read.pop(document, None)
            if staged is None:
                staged = read_document(socket, document, self._layout)
            self._read[document] = staged
            while len(self._read) > _KEPT:
                del self._read[next(iter(self._read))]
            return staged

    def _layout(self, digest: str) -> Layout | None:
        known = (staged.manifest.layout for staged in self._read.values())
        return next((layout for layout in known if layout.digest == digest), None)
