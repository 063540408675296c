"""Staging: one new shared-memory object per tensor against segments that are reused.

per_tensor is torchforge's way: for every tensor a POSIX shared-memory object is created, copied
into and closed; a reader process attaches it; at the end all are unlinked. The reader does not
read: per_tensor_verified adds what it takes to digest, which segments always includes.

segments is ours: every tensor is copied into warm segments; a fetcher process maps each segment,
parses its header and digests its tensors. Segments are forgotten between rounds, so that every
round pays for mapping; a server maps once.

Both copy the same bytes with the same memcpy, notify the reader as they go, and are checked against
digests taken beforehand from the source, in which every page changes between rounds. Unmapping in
the reader is left out on both sides. A virtual machine hands free pages back to its host, and
touching them again is dear: before each round 2.5 times the bytes are touched and freed, so that
both sides find pages that the machine has. With _as_is: without that.
"""

from __future__ import annotations

import asyncio
import mmap
import multiprocessing
import os
import secrets
import time
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.report import arguments, emit
from weightsync.model.digest import tensor_digest
from weightsync.model.layout import build_header
from weightsync.model.manifest import ShardEntry
from weightsync.shm.segments import Segment
from weightsync_server.workers.fetch.fetch_pool import FetcherPool

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from weightsync.model.manifest import TensorEntry

__all__ = ["main"]

_PAGE_WORDS = mmap.PAGESIZE // 8


@dataclass(frozen=True)
class Source:
    """What the trainer holds: one array and the tensors in it."""

    array: np.ndarray[tuple[int], np.dtype[np.uint64]]
    tensors: list[memoryview]

    @classmethod
    def make(cls, size: int, count: int) -> Source:
        """Return `count` tensors of unequal sizes, `size` bytes together."""
        words = size // 8
        array = np.arange(words, dtype=np.uint64)
        # Between a half and one and a half of the mean, in a fixed order.
        weights = 0.5 + np.modf(np.arange(count) * 0.6180339887)[0]
        ends = np.floor(np.cumsum(weights) / weights.sum() * words).astype(int)
        ends[-1] = words
        view = array.data.cast("B")
        begins = [0, *(int(end) for end in ends[:-1])]
        tensors = [view[8 * a : 8 * int(b)] for a, b in zip(begins, ends, strict=True)]
        return cls(array, tensors)

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return self.array.nbytes

    def change(self) -> list[bytes]:
        """Change a word in every page, and return the new digests."""
        self.array[::_PAGE_WORDS] += np.uint64(0x9E3779B97F4A7C15)
        return [tensor_digest(tensor) for tensor in self.tensors]


def warm_free_pages(size: int) -> None:
    """Touch and free `size` bytes of shared memory, so that the machine has free pages."""
    fd = os.memfd_create("warm")
    try:
        os.posix_fallocate(fd, 0, size)
        with mmap.mmap(fd, size) as mapping:
            for at in range(0, size, mmap.PAGESIZE):
                mapping[at] = 1
    finally:
        os.close(fd)


def _bytes(memory: SharedMemory) -> memoryview:
    assert memory.buf is not None
    return memory.buf


def _attach_all(link: Connection) -> None:
    """Be the reader of per_tensor: attach, then digest, then close, when told."""
    while True:
        attached: list[SharedMemory] = []
        sizes: list[int] = []
        while message := link.recv():
            name, size = message
            attached.append(SharedMemory(name=name))
            sizes.append(size)
        link.send(len(attached))
        if link.recv() == "end":
            return
        link.send(
            [tensor_digest(_bytes(m)[:size]) for m, size in zip(attached, sizes, strict=True)]
        )
        for memory in attached:
            memory.close()
        link.send("closed")


class PerTensor:
    """One shared-memory object per tensor."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._link, theirs = context.Pipe()
        self._reader = context.Process(target=_attach_all, args=(theirs,), daemon=True)
        self._reader.start()

    def round(self, source: Source, expected: list[bytes]) -> tuple[float, float]:
        """Return the seconds of one round, without and with the reader's digests."""
        begun = time.perf_counter()
        objects = []
        for tensor in source.tensors:
            name = f"weightsync-bench-{secrets.token_hex(8)}"
            memory = SharedMemory(name=name, create=True, size=tensor.nbytes)
            _bytes(memory)[: tensor.nbytes] = tensor
            memory.close()
            objects.append(memory)
            self._link.send((name, tensor.nbytes))
        self._link.send(None)
        self._link.recv()
        staged = time.perf_counter()
        self._link.send("digest")
        found = self._link.recv()
        digested = time.perf_counter()
        self._link.recv()
        closed = time.perf_counter()
        for memory in objects:
            memory.unlink()
        unlinked = time.perf_counter() - closed
        if found != expected:
            raise AssertionError("the reader of per_tensor saw other bytes")
        return staged - begun + unlinked, digested - begun + unlinked

    def close(self) -> None:
        """End the reader."""
        self._link.send(None)
        self._link.recv()
        self._link.send("end")
        self._reader.join()


@dataclass(frozen=True)
class Place:
    """A shard in its segment and the tensors that go there."""

    segment: Segment
    shard: ShardEntry
    entries: tuple[TensorEntry, ...]
    sources: list[memoryview]


class Segments:
    """Warm segments and a fetcher."""

    def __init__(self, source: Source, shards: int) -> None:
        self.pool = FetcherPool(1)
        per_shard = -(-len(source.tensors) // shards)
        self._places = [
            self._place(source.tensors[at : at + per_shard])
            for at in range(0, len(source.tensors), per_shard)
        ]

    @staticmethod
    def _place(tensors: list[memoryview]) -> Place:
        header, entries = build_header(
            (f"layers.{i}.weight", "U8", (tensor.nbytes,)) for i, tensor in enumerate(tensors)
        )
        shard = ShardEntry("shard", 8 + len(header) + entries[-1].end, len(header))
        segment = Segment.create(shard.size)
        segment.view[: shard.data_start] = len(header).to_bytes(8, "little") + header
        return Place(segment, shard, entries, tensors)

    async def round(self, expected: list[bytes]) -> float:
        """Return the seconds of one round."""
        begun = time.perf_counter()
        digesting = []
        for place in self._places:
            for entry, tensor in zip(place.entries, place.sources, strict=True):
                begin = place.shard.data_start + entry.begin
                place.segment.view[begin : begin + tensor.nbytes] = tensor
                await asyncio.sleep(0)
            digesting.append(asyncio.create_task(self.pool.digest(place.segment, place.shard)))
        found = await asyncio.gather(*digesting)
        seconds = time.perf_counter() - begun
        if [digest for digests in found for digest in digests] != expected:
            raise AssertionError("the fetcher saw other bytes")
        for place in self._places:
            await self.pool.forget(place.segment.id)
        return seconds

    def close(self) -> None:
        """Give the memory back."""
        for place in self._places:
            place.segment.close()


async def measure(source: Source, shards: int, rounds: int) -> dict[str, list[float]]:
    """Return one value per round of each figure; the two ways take turns."""
    samples: dict[str, list[float]] = {}
    theirs, ours = PerTensor(), Segments(source, shards)
    await ours.pool.start()
    try:
        await ours.round(source.change())
        theirs.round(source, source.change())
        for suffix in ("", "_as_is"):
            for _ in range(rounds):
                expected = source.change()
                if not suffix:
                    warm_free_pages(source.size * 5 // 2)
                attached, verified = theirs.round(source, expected)
                expected = source.change()
                if not suffix:
                    warm_free_pages(source.size * 5 // 2)
                staged = await ours.round(expected)
                for name, value in {
                    "per_tensor_gbps": source.size / 1e9 / attached,
                    "per_tensor_verified_gbps": source.size / 1e9 / verified,
                    "segments_gbps": source.size / 1e9 / staged,
                    "segments_over_per_tensor": attached / staged,
                    "segments_over_per_tensor_verified": verified / staged,
                }.items():
                    samples.setdefault(name + suffix, []).append(value)
    finally:
        theirs.close()
        await ours.pool.stop()
        ours.close()
    return samples


def main() -> None:
    """Run the benchmark from the command line."""
    parser = arguments(__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of all tensors")
    parser.add_argument("--tensors", type=int, default=400)
    parser.add_argument("--shards", type=int, default=16, help="segments for them")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    source = Source.make(options.mib << 20, options.tensors)
    samples = asyncio.run(measure(source, options.shards, options.rounds))
    parameters = {name: getattr(options, name) for name in ("mib", "tensors", "shards", "rounds")}
    wanted = {"segments_over_per_tensor_wanted": 2.5}
    emit("staging", parameters, samples, wanted, as_json=options.json)


if __name__ == "__main__":
    main()
