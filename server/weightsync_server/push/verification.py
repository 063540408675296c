"""The proof of a shard: its header gives its layout, its tensors have their digests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.digest import tensor_digest
from weightsync.model.layout import check_header
from weightsync.model.manifest import TensorEntry
from weightsync.shm.segments import Segment
from weightsync_server.catalog.commits import KnownLayout
from weightsync_server.push.shard_part import named
from weightsync_server.workers.fetch.fetch_api import FetchApi

if TYPE_CHECKING:
    from weightsync_server.push.shard_part import ShardPart, ShardState, TensorSlice


#: What links to descriptors of memfds begin with.
_MEMFD = "/memfd:"


def holds(pid: int, fd: int) -> bool:
    """Return whether a process is seen to have a memfd open or mapped; blocks.

    False also where its descriptors are not ours to see: of another user or namespace. No other
    file of the process is touched: one on a mount that hangs would keep us for ever. `fd` is our
    own descriptor of the memfd.
    """
    ours = os.fstat(fd)
    process = Path(f"/proc/{pid}")
    try:
        return _is_open(process / "fd", ours) or _is_mapped(process / "maps", ours)
    except OSError:
        return False


def _is_open(folder: Path, ours: os.stat_result) -> bool:
    for descriptor in folder.iterdir():
        try:
            # What a link says the kernel knows by itself; a stat asks the file system of the file.
            is_memory = str(descriptor.readlink()).startswith(_MEMFD)
            if is_memory and os.path.samestat(descriptor.stat(), ours):
                return True
        except OSError:
            # Closed meanwhile.
            continue
    return False


def _is_mapped(maps: Path, ours: os.stat_result) -> bool:
    device = f"{os.major(ours.st_dev):02x}:{os.minor(ours.st_dev):02x}"
    fields = (line.split(maxsplit=5) for line in maps.read_text().splitlines())
    return any(line[3:5] == [device, str(ours.st_ino)] for line in fields)


#: Larger headers are parsed in a thread.
_INLINE_HEADER_BYTES = 32 << 10
#: How often it is looked whether a writer is left, and seconds between two looks.
_LOOKS, _LOOK_S = 20, 0.05
_EMPTY = tensor_digest(b"")


async def check_taken_back(shard: int, segment: Segment, parts: Collection[ShardPart] = ()) -> None:
    """Prove that no trainer can write any more into a shard that all say is written."""
    # A process that the trainer forks has all its descriptors, until it runs another program.
    for _ in range(_LOOKS):
        if segment.taken_back():
            return
        await asyncio.sleep(_LOOK_S)
    if not segment.taken_back():
        # In a thread: a trainer may have tens of thousands of descriptors.
        writers = await asyncio.to_thread(_left, segment, parts)
        who = " or ".join(f"writer {writer}" for writer in writers)
        metadata = {"writer": str(writers[0])} if len(writers) == 1 else {}
        raise WeightSyncError(
            Reason.WRITER_LEFT,
            f"shard {shard} was reported as written, but {who or 'a process'} still holds its "
            "memory open for writing; close every descriptor and mapping first, then push the "
            "version again",
            metadata={"shard": str(shard), **metadata},
        )


def _left(segment: Segment, parts: Collection[ShardPart]) -> list[int]:
    """Return the writers that are seen to hold a segment, else all that were given it."""
    given = {part.writer: part.holder for part in parts if part.holder is not None}
    seen = [writer for writer, holder in given.items() if holds(holder, segment.fd)]
    return sorted(seen or given)


async def check_arrived_header(
    shard: ShardState, segment: Segment, known: KnownLayout | None
) -> None:
    """Prove that the header in the segment tells exactly the shard's layout."""
    await failpoints.reach("receive.header")
    entry = shard.entry
    length = int.from_bytes(segment.view[:8], "little")
    if length != entry.header_size:
        raise WeightSyncError(
            Reason.SHARD_INVALID,
            f"shard {shard.index} begins with a header of {length} bytes, but its layout declares "
            f"{entry.header_size}",
        )
    header = bytes(segment.view[8 : entry.data_start])
    digest = shard.header_digest = tensor_digest(header)
    if known is not None and known.headers.get(shard.index) == digest:
        return
    tensors = shard.tensors or ()
    if len(header) > _INLINE_HEADER_BYTES:
        await asyncio.to_thread(check_header, header, tensors)
    else:
        check_header(header, tensors)


async def verify(fetch: FetchApi, shard: ShardState, segment: Segment) -> list[bytes]:
    """Return the digests of a shard's tensors, as they are in memory; they must be as before."""
    found = await fetch.digest(segment, shard.entry)
    if shard.found not in (None, found):
        # Digested again because a write failed; the version may be staged with the first digests.
        raise WeightSyncError(
            Reason.DATA_CORRUPT,
            f"shard {shard.index} changed in shared memory; push the version again",
        )
    return found


async def verify_slices(
    fetch: FetchApi, shard: ShardState, segment: Segment, found: list[bytes]
) -> None:
    """Prove that the slices of all writers lie in memory as they have them, replicas too.

    `found` are the digests of the shard's tensors.
    """
    tensors, parts = shard.tensors or (), list(shard.parts.values())
    digests, less, spans = {}, [], []
    wanted = _wanted(parts)
    for part in parts:
        for one, span in zip(part.slices, part.spans, strict=True):
            if one.at.sizes == tensors[one.tensor].shape:
                digests[one] = found[one.tensor]
            elif one.at.elements and one in wanted:
                less.append(one)
                spans.append(span)
    if less:
        of_less = await fetch.digest_slices(segment, shard.entry, spans)
        digests |= dict(zip(less, of_less, strict=True))
    await asyncio.to_thread(_check_slices, tensors, parts, digests)
    for part in parts:
        if part.wants_digests:
            part.digests[: len(part.slices)] = [digests.get(one, _EMPTY) for one in part.slices]


def _wanted(parts: Iterable[ShardPart]) -> set[TensorSlice]:
    """Return the slices of which a digest was given, or is to be answered."""
    wanted = set()
    for part in parts:
        declared = zip(part.slices + part.replicas, part.digests, strict=True)
        wanted |= {one for one, given in declared if given is not None}
        wanted |= set(part.slices) if part.wants_digests else set()
    return wanted


def check_file(shard: ShardState) -> None:
    """Compare the digests that came with a shard's file with the fetchers', once both are here."""
    file, found = shard.file, shard.found
    if file is None or found is None or file.digests == found:
        return
    for tensor, ours, theirs in zip(shard.tensors or (), found, file.digests, strict=True):
        if theirs is not None and ours != theirs:
            raise WeightSyncError(
                Reason.DIGEST_MISMATCH,
                f"tensor {tensor.name!r} of shard {shard.index} arrived with digest "
                f"{ours.hex()}, the trainer computed {theirs.hex()}; push the version again",
                metadata={"tensor": tensor.name[:200], "shard": str(shard.index)},
            )


def _check_slices(
    tensors: Sequence[TensorEntry],
    parts: Collection[ShardPart],
    found: Mapping[TensorSlice, bytes],
) -> None:
    """Compare the digests that writers gave with `found`, those of what lies in memory."""
    first: dict[TensorSlice, tuple[int, bytes]] = {}
    for writer, one, digest in _claims(parts, found):
        other, theirs = first.setdefault(one, (writer, digest))
        if digest != theirs:
            raise _mismatch(
                tensors,
                one,
                writer,
                f"writers {other} and {writer} declared the same part, but their bytes of "
                f"{named(tensors, one)} differ",
            )
    # Of two that differ it is chance whose bytes lie there: each other's digests come first.
    for one, (writer, digest) in first.items():
        if digest != found[one]:
            raise _mismatch(
                tensors,
                one,
                writer,
                f"the bytes of {named(tensors, one)} arrived from writer {writer} with a "
                "different digest than that writer computed",
            )


def _claims(
    parts: Collection[ShardPart], found: Mapping[TensorSlice, bytes]
) -> Iterator[tuple[int, TensorSlice, bytes]]:
    for part in sorted(parts, key=lambda part: part.writer):
        for one, given in zip(part.slices + part.replicas, part.digests, strict=True):
            # Where none was given, the server itself has read the slice.
            digest = given or found.get(one)
            if one.at.elements and digest is not None:
                yield part.writer, one, digest


def _mismatch(
    tensors: Sequence[TensorEntry], one: TensorSlice, writer: int, problem: str
) -> WeightSyncError:
    return WeightSyncError(
        Reason.DIGEST_MISMATCH,
        f"{problem}; push the version again",
        metadata={"tensor": tensors[one.tensor].name[:200], "writer": str(writer)},
    )
