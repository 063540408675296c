"""What can be asked of fetchers, whoever runs them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from abc import ABC, abstractmethod
from dataclasses import astuple
from typing import TYPE_CHECKING, Any, NamedTuple

from weightsync.model.digest import DIGEST_BYTES
from weightsync.wire.notes import noted
from weightsync_server.store.objects.piece_digests import CacheOutcome
from weightsync_server.workers.fetch.delta_summary import unpack_changes

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence

    from weightsync.model.box_spans import BoxSpan
    from weightsync.model.manifest import ShardEntry
    from weightsync.shm.segments import Segment
    from weightsync_server.store.objects.piece_digests import PieceDigests
    from weightsync_server.workers.fetch.delta_summary import DeltaHeader, TensorDelta

__all__ = ["ComposeOrder", "FetchApi", "GpuSource", "PatchOrder", "Piece", "StridedPiece"]

#: Of memory on a GPU: the number of its handle, the offset in what that opens, the offset in the
#: segment and the size, in bytes.
Piece = tuple[int, int, int, int]


class StridedPiece(NamedTuple):
    """Rows on a GPU that lie in a row there, and apart in the segment.

    Attributes:
        handle: The number of the handle that opens them.
        offset: Of the first row in what that opens, in bytes.
        at: Offset of the first row in the segment, in bytes.
        run: Bytes of a row.
        rows: How many there are.
        stride: Bytes from one row to the next in the segment.
    """

    handle: int
    offset: int
    at: int
    run: int
    rows: int
    stride: int


class GpuSource(NamedTuple):
    """Memory that a trainer holds on a GPU, and where it goes.

    Attributes:
        trainer: Names whose it is.
        device: UUID of the GPU, hexadecimal.
        handles: Open the allocations (cuIpcGetMemHandle), hexadecimal.
        pieces: What goes where.
        strided: And so do these.
    """

    trainer: str
    device: str
    handles: Sequence[str]
    pieces: Sequence[Piece]
    strided: Sequence[StridedPiece] = ()


class PatchOrder(NamedTuple):
    """What a delta shard makes of boxes.

    Attributes:
        size: Bytes of the delta shard.
        base_content_digest: What it must name as its base.
        kinds: Dtype and shape of every box that it may tell of, by name.
        boxes: Those that are wanted, and where they lie in the shard.
    """

    size: int
    base_content_digest: str
    kinds: Mapping[str, tuple[str, Sequence[int]]]
    boxes: Sequence[tuple[str, BoxSpan]]


class ComposeOrder(NamedTuple):
    """Which tensors of a shard a delta shard is made of.

    Attributes:
        shard: Index of both in their push.
        base_content_digest: Of the version that the delta shard changes.
        layout_digest: Signature of that version's tensors.
        tensors: Name, dtype, shape, where it begins and ends in the shard, and hexadecimal digest
            of each.
    """

    shard: int
    base_content_digest: str
    layout_digest: str
    tensors: Sequence[tuple[str, str, Sequence[int], int, int, str]]


#: Bytes of a shard that are worth a task of their own; so many times the header's are, too.
_LEAST_PART, _HEADERS = 16 << 20, 512


class FetchApi(ABC):
    """The tasks of fetchers, one method each; `FetcherPool` gets them done."""

    @abstractmethod
    def _compute(
        self, op: str, segment: Segment, size: int, **facts: Any
    ) -> Coroutine[Any, Any, bytes]:
        """Ask for work that a slow disk must never hold up; await the answer's blob."""

    @property
    @abstractmethod
    def _sharing(self) -> int:
        """Return among how many fetchers the next digest is worth cutting."""

    @abstractmethod
    def warm(self) -> None:
        """Get ready for deltas: the first one would be slow."""

    @abstractmethod
    def forget(self, segment_id: str) -> asyncio.Future[list[None]]:
        """Unmap a segment everywhere; the result tells when."""

    @abstractmethod
    async def _transfer(self, op: str, segment: Segment, size: int, **facts: Any) -> bytes:
        """Have files read or written; return the answer's blob."""

    async def digest(self, segment: Segment, shard: ShardEntry) -> list[bytes]:
        """Return the xxh3-128 of each tensor, in the order of `model.layout.check_shard`.

        Args:
            segment: Holds the whole shard.
            shard: Its declared sizes in bytes; the header in the segment is checked against them.

        Raises:
            WeightSyncError: SHARD_INVALID, LAYOUT_INVALID, FETCHER_FAILED, SHUTTING_DOWN.
        """
        count = self._parts(shard)
        facts = {"shard": astuple(shard)}
        asked = [
            self._compute("digest", segment, shard.size, part=(number, count), **facts)
            for number in range(count)
        ]
        blob = b"".join(await _together(asked))
        return [blob[at : at + DIGEST_BYTES] for at in range(0, len(blob), DIGEST_BYTES)]

    async def digest_boxes(
        self, segment: Segment, shard: ShardEntry, spans: Sequence[BoxSpan]
    ) -> list[bytes]:
        """Return the xxh3-128 of the bytes of each box.

        Args:
            segment: Holds the whole shard.
            shard: Its declared sizes in bytes.
            spans: Where the boxes lie in it.

        Raises:
            WeightSyncError: FETCHER_FAILED, SHUTTING_DOWN.
        """
        count = min(self._parts(shard), len(spans))
        with contextlib.ExitStack() as stack:
            asked = []
            for number in range(count):
                part = spans[number * len(spans) // count : (number + 1) * len(spans) // count]
                fd = stack.enter_context(noted({"spans": part}))
                asked.append(self._compute("boxes", segment, shard.size, source_fd=fd))
            blob = b"".join(await _together(asked))
        return [blob[at : at + DIGEST_BYTES] for at in range(0, len(blob), DIGEST_BYTES)]

    async def patch_boxes(
        self, segment: Segment, base: Segment, patch: Segment, order: PatchOrder
    ) -> None:
        """Fill boxes of a segment with what a delta shard makes of them.

        Args:
            segment: Takes the bytes; when this raises, the boxes hold anything.
            base: The same shard of the version that the delta shard changes.
            patch: Holds the delta shard.
            order: What it is and where the boxes lie.

        Raises:
            WeightSyncError: SHARD_INVALID, DIGEST_MISMATCH, LAYOUT_INVALID, FETCHER_FAILED,
                SHUTTING_DOWN.
        """
        with noted(order._asdict()) as fd:
            facts: dict[str, Any] = {"fills": True, "others": [base, patch], "source_fd": fd}
            await self._compute("patch_boxes", segment, segment.capacity, **facts)

    async def compose(
        self, segment: Segment, size: int, source: Segment, order: ComposeOrder
    ) -> None:
        """Fill a segment with the delta shard that makes tensors what they are in a shard.

        Args:
            segment: Takes the bytes; when this raises, it holds anything.
            size: Those of the delta shard.
            source: Holds the shard.
            order: Which tensors, and what they change.

        Raises:
            WeightSyncError: FETCHER_FAILED, SHUTTING_DOWN.
        """
        with noted(order._asdict()) as fd:
            facts: dict[str, Any] = {"fills": True, "others": [source], "source_fd": fd}
            await self._compute("compose", segment, size, **facts)

    def _parts(self, shard: ShardEntry) -> int:
        # Where others wait, all are busy anyway; the last shards of a push would keep a few only.
        # Each reads the header again, which takes as long as digesting some hundred times its size.
        least = max(_LEAST_PART, _HEADERS * shard.header_size)
        return max(1, min(self._sharing, shard.size // least))

    async def persist(self, segment: Segment, size: int, target: str) -> None:
        """Write the first `size` bytes of a segment to the file `target`, replacing it.

        When this returns the file's bytes are on disk; its name is once the directory is flushed
        (`Store.commit`). When it raises, `target` is as it was.

        Raises:
            WeightSyncError: DISK_EXHAUSTED, FAULT, FETCHER_FAILED, SHUTTING_DOWN.
        """
        temporary = f"{target}.{secrets.token_hex(4)}.tmp"
        await self._transfer("persist", segment, size, target=target, temporary=temporary)

    async def keep(
        self, segment: Segment, shard: ShardEntry, begin: int, end: int, target: str
    ) -> None:
        """Make bytes of a shard that is still arriving durable, so that `restore` finds them.

        Args:
            segment: Holds the shard up to `end`.
            shard: Its name and sizes in bytes.
            begin: End of what was kept before; 0: nothing was.
            end: One past the last byte to keep; the header is among the first bytes kept.
            target: The shard's file; a list lies beside it.

        Raises:
            WeightSyncError: DISK_EXHAUSTED, FAULT, FETCHER_FAILED, SHUTTING_DOWN; as many bytes are
                kept as before.
        """
        facts = {"shard": astuple(shard), "begin": begin, "target": target}
        await self._transfer("keep", segment, end, **facts)

    async def restore(self, segment: Segment, shard: ShardEntry, source: str) -> int:
        """Fill a segment with what `keep` kept of a shard; return how many bytes are undamaged.

        Raises:
            WeightSyncError: DATA_CORRUPT when it is none; FETCHER_FAILED, SHUTTING_DOWN.
        """
        facts = {"shard": astuple(shard), "source": source}
        blob = await self._transfer("restore", segment, shard.size, fills=True, **facts)
        return int.from_bytes(blob, "big")

    async def load(self, source_fd: int | str, size: int, segment: Segment) -> None:
        """Fill the first `size` bytes of a segment with a whole file.

        Args:
            source_fd: Path, or an open descriptor, whose offset stays and which the caller closes.
            size: Exact length of the file in bytes.
            segment: Takes the bytes; when this raises, it holds anything.

        Raises:
            WeightSyncError: DATA_CORRUPT, FETCHER_FAILED, SHUTTING_DOWN.
        """
        if isinstance(source_fd, str):
            await self._transfer("load", segment, size, fills=True, source=source_fd)
        else:
            await self._transfer("load", segment, size, fills=True, source_fd=source_fd)

    async def load_cached(
        self, place: str, url: str, pieces: PieceDigests, size: int, segment: Segment
    ) -> CacheOutcome:
        """Fill the first `size` bytes of a segment with a shard that a cache may have, unchanged.

        Args:
            place: Of the shard in its store, which has what the cache lacks.
            url: Of the shard in the cache.
            pieces: Prove what comes from there.
            size: Exact length of the shard in bytes.
            segment: Takes the bytes; when this raises, it holds anything.

        Raises:
            WeightSyncError: DATA_CORRUPT, FAULT, FETCHER_FAILED, SHUTTING_DOWN.
        """
        with noted({"url": url, "pieces": pieces.to_json()}) as fd:
            facts: dict[str, Any] = {"fills": True, "source": place, "source_fd": fd}
            blob = await self._transfer("load_cached", segment, size, **facts)
        return CacheOutcome(*json.loads(blob))

    async def collect(self, segment: Segment, source: GpuSource) -> None:
        """Fill parts of a segment with memory that another process holds on a GPU.

        What was opened for that is closed once nothing is copied for the same trainer.

        Args:
            segment: Takes the bytes; when this raises, the parts hold anything.
            source: Where they are.

        Raises:
            WeightSyncError: NOT_SUPPORTED: that memory cannot be opened here; nothing was written.
                REQUEST_INVALID, FETCHER_FAILED, SHUTTING_DOWN.
        """
        with noted(source._asdict()) as fd:
            # Never again: what a device failed at once, it fails at again.
            how: dict[str, Any] = {"fills": True, "again": False, "source_fd": fd}
            await self._compute("collect", segment, segment.capacity, **how)

    async def copy(self, source: Segment, size: int, segment: Segment) -> None:
        """Fill the first `size` bytes of a segment with those of another one.

        Raises:
            WeightSyncError: FETCHER_FAILED, SHUTTING_DOWN; the segment holds anything.
        """
        await self._compute("copy", segment, size, fills=True, others=[source])

    async def inspect(
        self, layout: Segment, shard: ShardEntry, source: Segment | str
    ) -> tuple[DeltaHeader, list[TensorDelta]]:
        """Prove that a delta shard is whole; return what it is of, and what it changes.

        Args:
            layout: Holds the canonical layout, from `weightsync_server.deltas`.
            shard: Declared sizes of the delta shard in bytes.
            source: Where it lies: a segment, or the path of a file.

        Raises:
            WeightSyncError: SHARD_INVALID, DIGEST_MISMATCH, LAYOUT_INVALID, DATA_CORRUPT,
                FETCHER_FAILED, SHUTTING_DOWN.
        """
        facts = {"delta": astuple(shard), **_place(source)}
        blob = await self._compute("inspect", layout, layout.capacity, **facts)
        return await asyncio.to_thread(unpack_changes, blob)

    async def patch(
        self,
        segment: Segment,
        index: int,
        layout: Segment,
        shard: ShardEntry,
        source: Segment | str,
    ) -> None:
        """Change a canonical shard, which holds the base, as a delta shard tells.

        Never tried again when a fetcher is lost: a change of changed bytes would be another one.

        Args:
            segment: Holds the canonical shard.
            index: Index of that shard in the layout.
            layout: As in `inspect`, and so are
            shard: and
            source: the delta shard.

        Raises:
            WeightSyncError: As `inspect`; the segment may be changed in part.
        """
        facts = {"delta": astuple(shard), "index": index, **_place(source, layout)}
        await self._compute("patch", segment, segment.capacity, fills=True, again=False, **facts)


async def _together(asked: Sequence[Coroutine[Any, Any, bytes]]) -> list[bytes]:
    """Return all answers. When one fails, or the caller is cancelled, all have ended at its end."""
    tasks = [asyncio.ensure_future(one) for one in asked]
    pending, interrupted = set(tasks), False
    while pending:
        try:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:
            interrupted = True
        # Once more at most: nobody comes here twice without another cancellation.
        for task in pending:
            task.cancel()
    errors = [task.exception() for task in tasks if not task.cancelled()]
    if interrupted:
        raise asyncio.CancelledError
    for error in filter(None, errors):
        raise error
    return [task.result() for task in tasks]


def _place(source: Segment | str, *before: Segment) -> dict[str, Any]:
    if isinstance(source, str):
        return {"others": [*before], "source": source}
    return {"others": [*before, source]}
