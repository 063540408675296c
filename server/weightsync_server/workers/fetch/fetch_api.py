"""What can be asked of fetchers, whoever runs them, and what they tell."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import struct
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any, NamedTuple

from weightsync.model.digest import DIGEST_BYTES
from weightsync.model.manifest import ShardEntry
from weightsync.model.tensor_slices import SliceSpan
from weightsync.wire.child_channel import noted
from weightsync_server.store.objects.piece_digests import CacheOutcome, PieceDigests

if TYPE_CHECKING:
    from weightsync.shm.segments import Segment

#: How positions can be coded; a coding's number is its place.
CODINGS = ("dense", "gap16", "gap8", "bitmap")
_HEAD = struct.Struct(f"<I{DIGEST_BYTES}s{DIGEST_BYTES}s")
_ROW = struct.Struct(f"<IQB{DIGEST_BYTES}s")


class DeltaHeader(NamedTuple):
    """What a delta shard tells of itself; `shard` is its index in its push.

    `base_content_digest` has 32 hexadecimal digits; `layout_digest` is the canonical layout's
    `Layout.signature`.
    """

    shard: int
    base_content_digest: str
    layout_digest: str


class TensorDelta(NamedTuple):
    """One changed tensor, by its place in the canonical layout.

    `changed` counts the elements that the delta tells, `coding` is a number in `CODINGS`, and
    `digest` is of its full new bytes.
    """

    tensor: int
    changed: int
    coding: int
    digest: bytes


def pack_changes(header: DeltaHeader, changes: Iterable[TensorDelta]) -> bytes:
    base, layout = bytes.fromhex(header.base_content_digest), bytes.fromhex(header.layout_digest)
    return _HEAD.pack(header.shard, base, layout) + b"".join(_ROW.pack(*row) for row in changes)


def unpack_changes(blob: bytes) -> tuple[DeltaHeader, list[TensorDelta]]:
    shard, base, layout = _HEAD.unpack_from(blob)
    rows = _ROW.iter_unpack(memoryview(blob)[_HEAD.size :])
    return DeltaHeader(shard, base.hex(), layout.hex()), [TensorDelta(*row) for row in rows]


#: Of memory on a GPU: the number of its handle, the offset in what that opens, the offset in the
#: segment and the size, in bytes.
Piece = tuple[int, int, int, int]


class StridedPiece(NamedTuple):
    """Rows that are contiguous on a GPU, and `stride` bytes from start to start in the segment.

    The first row begins at byte `offset` of what the handle with number `handle` opens, and at byte
    `at` of the segment. `run` is the bytes of a row.
    """

    handle: int
    offset: int
    at: int
    run: int
    rows: int
    stride: int


class GpuSource(NamedTuple):
    """Memory that a trainer holds on a GPU, and where it goes.

    `device` (the GPU's UUID) and `handles` (cuIpcGetMemHandle) are hexadecimal.
    """

    trainer: str
    device: str
    handles: Sequence[str]
    pieces: Sequence[Piece]
    strided: Sequence[StridedPiece] = ()


class PatchOrder(NamedTuple):
    """What a delta shard of `size` bytes, of base `base_content_digest`, makes of slices.

    `kinds` has, by name, dtype and shape of every slice that it may tell of; `slices` are those
    wanted, and where they lie in the shard.
    """

    size: int
    base_content_digest: str
    kinds: Mapping[str, tuple[str, Sequence[int]]]
    slices: Sequence[tuple[str, SliceSpan]]


class ComposeOrder(NamedTuple):
    """Which tensors of a shard a delta shard is made of; `shard` is the index of both.

    `tensors` has name, dtype, shape, begin and end in the shard, and hexadecimal digest of each.
    The other two digests are of the version that the delta shard changes.
    """

    shard: int
    base_content_digest: str
    layout_digest: str
    tensors: Sequence[tuple[str, str, Sequence[int], int, int, str]]


#: Bytes of a shard that are worth a task of their own; so many times the header's are, too.
_LEAST_PART, _HEADERS = 16 << 20, 512


class FetchApi(ABC):
    """The tasks of fetchers, one method each; `FetcherPool` gets them done.

    Each may also raise FETCHER_FAILED or SHUTTING_DOWN. When one that fills a segment, or parts of
    it, raises, these hold anything.
    """

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

        The header is checked against the sizes in `shard`.
        """
        count = self._parts(shard)
        facts = {"shard": astuple(shard)}
        asked = [
            self._compute("digest", segment, shard.size, part=(number, count), **facts)
            for number in range(count)
        ]
        blob = b"".join(await _together(asked))
        return [blob[at : at + DIGEST_BYTES] for at in range(0, len(blob), DIGEST_BYTES)]

    async def digest_slices(
        self, segment: Segment, shard: ShardEntry, spans: Sequence[SliceSpan]
    ) -> list[bytes]:
        count = min(self._parts(shard), len(spans))
        with contextlib.ExitStack() as stack:
            asked = []
            for number in range(count):
                part = spans[number * len(spans) // count : (number + 1) * len(spans) // count]
                fd = stack.enter_context(noted({"spans": part}))
                asked.append(self._compute("boxes", segment, shard.size, source_fd=fd))
            blob = b"".join(await _together(asked))
        return [blob[at : at + DIGEST_BYTES] for at in range(0, len(blob), DIGEST_BYTES)]

    async def patch_slices(
        self, segment: Segment, base: Segment, patch: Segment, order: PatchOrder
    ) -> None:
        """Fill slices of a segment with what the delta shard in `patch` makes of them.

        `base` has the same shard of the version that is changed. Raises SHARD_INVALID,
        DIGEST_MISMATCH or LAYOUT_INVALID.
        """
        with noted(order._asdict()) as fd:
            facts: dict[str, Any] = {"fills": True, "others": [base, patch], "source_fd": fd}
            await self._compute("patch_boxes", segment, segment.capacity, **facts)

    async def compose(
        self, segment: Segment, size: int, source: Segment, order: ComposeOrder
    ) -> None:
        """Fill a segment with the delta shard that makes tensors what they are in `source`.

        `size` is that of the delta shard.
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
        (`Store.commit`). When it raises, DISK_EXHAUSTED and FAULT too, `target` is as it was.
        """
        temporary = f"{target}.{secrets.token_hex(4)}.tmp"
        await self._transfer("persist", segment, size, target=target, temporary=temporary)

    async def keep(
        self, segment: Segment, shard: ShardEntry, begin: int, end: int, target: str
    ) -> None:
        """Make bytes of a shard that is still arriving durable, so that `restore` finds them.

        `segment` holds the shard up to `end`; `begin` is the end of what was kept before, and still
        is when this raises, DISK_EXHAUSTED and FAULT too. The first bytes kept include the header.
        `target` is the shard's file.
        """
        facts = {"shard": astuple(shard), "begin": begin, "target": target}
        await self._transfer("keep", segment, end, **facts)

    async def restore(self, segment: Segment, shard: ShardEntry, source: str) -> int:
        """Fill a segment with what `keep` kept of a shard; return how many bytes are undamaged.

        Raises DATA_CORRUPT when nothing can be read.
        """
        facts = {"shard": astuple(shard), "source": source}
        blob = await self._transfer("restore", segment, shard.size, fills=True, **facts)
        return int.from_bytes(blob, "big")

    async def load(self, source_fd: int | str, size: int, segment: Segment) -> None:
        """Fill the start of a segment with a whole file of exactly `size` bytes.

        An open descriptor keeps its offset, and the caller closes it. Raises DATA_CORRUPT when the
        file has another length or cannot be read.
        """
        if isinstance(source_fd, str):
            await self._transfer("load", segment, size, fills=True, source=source_fd)
        else:
            await self._transfer("load", segment, size, fills=True, source_fd=source_fd)

    async def load_cached(
        self, place: str, url: str, pieces: PieceDigests, size: int, segment: Segment
    ) -> CacheOutcome:
        """Fill the first `size` bytes of a segment with a shard that a cache may have, unchanged.

        `place` is in the shard's store, which has what the cache lacks; `url` is in the cache.
        `pieces` prove what comes from the cache. `size` is the exact length of the shard. Raises
        DATA_CORRUPT and FAULT, too.
        """
        with noted({"url": url, "pieces": pieces.to_json()}) as fd:
            facts: dict[str, Any] = {"fills": True, "source": place, "source_fd": fd}
            blob = await self._transfer("load_cached", segment, size, **facts)
        return CacheOutcome(*json.loads(blob))

    async def collect(self, segment: Segment, source: GpuSource) -> None:
        """Fill parts of a segment with memory that another process holds on a GPU.

        What was opened for that is closed once nothing is copied for the same trainer. Raises
        NOT_SUPPORTED when the memory cannot be opened here, with nothing written, and
        REQUEST_INVALID.
        """
        with noted(source._asdict()) as fd:
            # Never again: what a device failed at once, it fails at again.
            how: dict[str, Any] = {"fills": True, "again": False, "source_fd": fd}
            await self._compute("collect", segment, segment.capacity, **how)

    async def copy(self, source: Segment, size: int, segment: Segment) -> None:
        await self._compute("copy", segment, size, fills=True, others=[source])

    async def inspect(
        self, layout: Segment, shard: ShardEntry, source: Segment | str
    ) -> tuple[DeltaHeader, list[TensorDelta]]:
        """Prove that a delta shard is whole; return what it is of, and what it changes.

        `layout` holds the canonical layout. `shard` has the declared sizes of the delta shard, and
        `source` is its segment or the path of its file. Raises SHARD_INVALID, DIGEST_MISMATCH,
        LAYOUT_INVALID or DATA_CORRUPT.
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
        """Change the canonical shard `index`, which holds the base, as a delta shard tells.

        Never tried again when a fetcher is lost: a change of changed bytes would be another one.
        The other arguments are as in `inspect`.
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
