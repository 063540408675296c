"""A whole receiving side in one process: real segments, real fetcher processes, a real store."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import struct
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsync.errors import WeightSyncError
from weightsync.model.digest import content_digest, tensor_digest
from weightsync.model.layout import build_header
from weightsync.shm.segment_socket import SegmentServer
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.garbage_collector import Retention
from weightsync_server.deltas import ChainSettings
from weightsync_server.model import ModelSettings, open_model
from weightsync_server.ops.os_errors import write_fault
from weightsync_server.ops.tasks import in_thread
from weightsync_server.push import PushService, PushSettings, read_message
from weightsync_server.residency.segment_allocator import SegmentAllocator, SegmentBudget
from weightsync_server.store import open_store
from weightsync_server.workers.fetch import delta_tasks, shard_tasks
from weightsync_server.workers.fetch.fetch_api import FetchApi, unpack_changes
from weightsync_server.workers.fetch.fetch_pool import FetcherPool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence

    from weightsync.model.manifest import ShardEntry, TensorEntry
    from weightsync.model.tensor_slices import SliceSpan
    from weightsync.shm.segments import Segment
    from weightsync_server.model import Model
    from weightsync_server.ops.metrics import DeltaCounts
    from weightsync_server.push import Message
    from weightsync_server.workers.fetch.fetch_api import DeltaHeader, TensorDelta

MODEL = "m"

#: Name, dtype, shape, bytes.
Tensor = tuple[str, str, tuple[int, ...], bytes]


@dataclass
class Shard:
    """A safetensors file made by the test and all that a trainer says about it."""

    index: int
    data: bytes
    header_size: int
    entries: tuple[TensorEntry, ...]
    digests: list[bytes]
    name: str = ""

    def layout(self, per_part: int = 10_000) -> list[pb.PushWeightsRequest]:
        specs = [
            pb.TensorSpec(name=t.name, dtype=t.dtype, shape=t.shape, begin=t.begin, end=t.end)
            for t in self.entries
        ]
        groups = [specs[at : at + per_part] for at in range(0, len(specs), per_part)] or [[]]
        return [
            pb.PushWeightsRequest(
                layout=pb.LayoutPart(
                    shard=self.index,
                    shard_name=self.name,
                    size_bytes=len(self.data),
                    header_bytes=self.header_size,
                    tensors=group,
                    last=number == len(groups) - 1,
                )
            )
            for number, group in enumerate(groups)
        ]

    def chunks(self, size: int = 1 << 20, start: int = 0) -> list[pb.PushWeightsRequest]:
        return [
            chunk(self.index, at, self.data[at : at + size])
            for at in range(start, len(self.data), size)
        ]

    def given(self, per_part: int = 50_000) -> list[pb.PushWeightsRequest]:
        return [
            pb.PushWeightsRequest(
                digests=pb.ShardDigests(
                    shard=self.index,
                    first=at,
                    digests=b"".join(self.digests[at : at + per_part]),
                )
            )
            for at in range(0, len(self.digests), per_part)
        ]

    def all(self, size: int = 1 << 20) -> list[pb.PushWeightsRequest]:
        return [*self.layout(), *self.chunks(size), *self.given()]


def chunk(shard: int, offset: int, data: bytes) -> pb.PushWeightsRequest:
    return pb.PushWeightsRequest(chunk=pb.Chunk(shard=shard, offset=offset, data=data))


def make_shard(index: int, tensors: Sequence[Tensor]) -> Shard:
    by_name = {name: data for name, _, _, data in tensors}
    header, entries = build_header([(n, d, s) for n, d, s, _ in tensors], index)
    body = b"".join(by_name[entry.name] for entry in entries)
    digests = [tensor_digest(by_name[entry.name]) for entry in entries]
    data = struct.pack("<Q", len(header)) + header + body
    return Shard(index, data, len(header), entries, digests, f"model-{index}.safetensors")


def content(shards: Iterable[Shard]) -> str:
    return content_digest(
        (entry.name, entry.dtype, entry.shape, digest)
        for shard in shards
        for entry, digest in zip(shard.entries, shard.digests, strict=True)
    )


def simple(seed: int = 0, shards: int = 2, size: int = 1000) -> list[Shard]:
    """Return a small version whose bytes depend on `seed`."""
    return [
        make_shard(
            index,
            [
                (
                    f"s{index}.a",
                    "F32",
                    (size,),
                    bytes((seed + index + i) % 256 for i in range(4 * size)),
                ),
                (f"s{index}.b", "BF16", (3,), bytes([seed % 256, index, 2, 3, 4, 5])),
            ],
        )
        for index in range(shards)
    ]


def begin(**fields: Any) -> pb.BeginPushRequest:
    return pb.BeginPushRequest(**{"model": MODEL, **fields})


async def sending(messages: Iterable[pb.PushWeightsRequest]) -> AsyncIterator[Message]:
    """Yield what a server reads of messages that a client sends."""
    for message in messages:
        yield read_message(message.SerializeToString())


def one_stream(
    shards: Sequence[Shard],
    *,
    commit: str | None = "",
    probes: pb.Probes | None = None,
    **fields: Any,
) -> AsyncIterator[Message]:
    """Return the messages of a trainer that does all in one call."""
    messages = [pb.PushWeightsRequest(begin=begin(**fields))]
    for shard in shards:
        messages += shard.all()
    if commit is not None:
        last = pb.CommitPushRequest(content_digest=commit, probes=probes)
        messages.append(pb.PushWeightsRequest(commit=last))
    return sending(messages)


@dataclass
class Counts:
    """Meters that remember."""

    phases: dict[str, list[float]] = field(default_factory=dict)
    pushes: dict[str, int] = field(default_factory=dict)
    received: int = 0
    cast: int = 0
    deltas: list[DeltaCounts] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)

    def observe_phase(self, phase: str, seconds: float) -> None:
        self.phases.setdefault(phase, []).append(seconds)

    def count_push(self, outcome: str) -> None:
        self.pushes[outcome] = self.pushes.get(outcome, 0) + 1

    def add_received(self, size: int) -> None:
        self.received += size

    def count_delta(self, counts: DeltaCounts) -> None:
        self.deltas.append(counts)

    def count_cast(self, tensors: int) -> None:
        self.cast += tensors

    def count_fallback(self, reason: str) -> None:
        self.fallbacks.append(reason)


@dataclass
class World:
    model: Model
    pushes: PushService
    meters: Counts
    budget: SegmentBudget
    fetchers: FetchApi
    server: SegmentServer

    async def push(self, shards: Sequence[Shard], version: int = 0, **fields: Any) -> int:
        """Push and commit; return the version."""
        response = await self.pushes.stream(one_stream(shards, version=version, **fields))
        return response.version

    async def join(
        self, push_id: str, messages: Iterable[pb.PushWeightsRequest]
    ) -> pb.PushWeightsResponse:
        first = pb.PushWeightsRequest(join=pb.JoinPush(push_id=push_id))
        return await self.pushes.stream(sending([first, *messages]))

    def read(self, version: int) -> list[bytes]:
        """Return what lies in the version's slot."""
        record = self.model.table.get(version)
        assert record.slot is not None
        assert record.manifest is not None
        shards = record.manifest.layout.shards
        pairs = zip(record.slot.ordered(), shards, strict=True)
        return [bytes(segment.view[: shard.size]) for segment, shard in pairs]


@contextlib.asynccontextmanager
async def world(
    folder: Path,
    *,
    fetchers: FetchApi | None = None,
    store: str = "",
    identity: str = "",
    slots: int = 2,
    limits: Mapping[str, float] | None = None,
    retention: Retention | None = None,
    chains: ChainSettings | None = None,
    memory: int = 1 << 30,
    pushes_of: type[PushService] = PushService,
    **elsewhere: Any,
) -> AsyncIterator[World]:
    fetchers = fetchers or Threads()
    await asyncio.to_thread(folder.mkdir, exist_ok=True)
    keeper = open_store(store or f"file://{folder / 'store'}", identity)
    records = await keeper.open()
    server = SegmentServer(folder / "segments.sock")
    budget = SegmentBudget(memory)
    segments = SegmentAllocator(budget, server, fetchers)
    bounds = ModelSettings(slots, retention or Retention(), chains or ChainSettings(), 0, 0)
    model = await open_model(MODEL, keeper, fetchers, segments, bounds, records, **elsewhere)
    meters = Counts()
    pushes = pushes_of(model, limits=PushSettings(**(limits or {})), meters=meters)  # type: ignore[arg-type]
    await pushes.restore()
    try:
        yield World(model, pushes, meters, budget, fetchers, server)
    finally:
        await pushes.close()
        await model.close()
        server.close()


class Threads(FetchApi):
    """Does a fetcher's work in threads of this process, for tests of other things than processes.

    Attributes:
        errors: Raised by the next digests, one each.
        gate: Persists wait for it when it is set to an event.
        full: Persists find a full disk.
        forgotten: Ids of segments that were to be unmapped.
    """

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.gate: asyncio.Event | None = None
        self.full = False
        self.forgotten: list[str] = []
        self.persisted: list[str] = []
        self.warmed = False

    # No task is cut into parts here, nor queued.
    _sharing = 1

    async def _compute(self, op: str, segment: Segment, size: int, **facts: Any) -> bytes:
        if op == "compose":
            (source,) = facts["others"]
            with memoryview(segment.view)[:size] as view:
                await _apart(delta_tasks.compose, view, source.view, facts["source_fd"])
            return b""
        if op != "patch_boxes":
            raise NotImplementedError(op)
        base, changes = facts["others"]
        task = segment.view, base.view, changes.view, facts["source_fd"], threading.Event()
        await in_thread(delta_tasks.patch_slices, *task)
        return b""

    async def _transfer(self, op: str, segment: Segment, size: int, **facts: Any) -> bytes:
        raise NotImplementedError(op)

    async def digest(self, segment: Segment, shard: ShardEntry) -> list[bytes]:
        if self.errors:
            raise self.errors.pop(0)
        blob = await in_thread(shard_tasks.digest, segment.view, shard, (0, 1), threading.Event())
        return [blob[at : at + 16] for at in range(0, len(blob), 16)]

    async def digest_slices(
        self, segment: Segment, shard: ShardEntry, spans: Sequence[SliceSpan]
    ) -> list[bytes]:
        return [
            tensor_digest(b"".join(bytes(piece) for piece in span.pieces(segment.view)))
            for span in spans
        ]

    async def persist(self, segment: Segment, size: int, target: str) -> None:
        if self.gate is not None:
            await self.gate.wait()
        if self.full:
            raise write_fault(OSError(errno.ENOSPC, "No space left on device"), "writing")
        with memoryview(segment.view)[:size] as view:
            temporary = f"{target}.x.tmp"
            await in_thread(shard_tasks.persist, view, target, temporary, threading.Event())
        self.persisted.append(target)

    async def keep(
        self, segment: Segment, shard: ShardEntry, begin: int, end: int, target: str
    ) -> None:
        if self.gate is not None:
            await self.gate.wait()
        if self.full:
            raise write_fault(OSError(errno.ENOSPC, "No space left on device"), "writing")
        with memoryview(segment.view)[:end] as view:
            await in_thread(shard_tasks.keep, view, shard, begin, target, threading.Event())
        self.persisted.append(target)

    async def restore(self, segment: Segment, shard: ShardEntry, source: str) -> int:
        with memoryview(segment.view)[: shard.size] as view:
            good: int = await in_thread(shard_tasks.restore, view, shard, source, threading.Event())
            return good

    async def load(self, source_fd: int | str, size: int, segment: Segment) -> None:
        fd = os.open(source_fd, os.O_RDONLY) if isinstance(source_fd, str) else os.dup(source_fd)
        try:
            with memoryview(segment.view)[:size] as view:
                await in_thread(shard_tasks.load, fd, view, threading.Event())
        finally:
            os.close(fd)

    async def copy(self, source: Segment, size: int, segment: Segment) -> None:
        with memoryview(source.view)[:size] as theirs, memoryview(segment.view)[:size] as ours:
            await in_thread(delta_tasks.copy, theirs, ours, threading.Event())

    async def inspect(
        self, layout: Segment, shard: ShardEntry, source: Segment | str
    ) -> tuple[DeltaHeader, list[TensorDelta]]:
        known = delta_tasks.canonical(layout.id, layout.view)
        with _delta(shard, source) as delta:
            return unpack_changes(await _apart(delta_tasks.inspect, known, delta))

    async def patch(
        self,
        segment: Segment,
        index: int,
        layout: Segment,
        shard: ShardEntry,
        source: Segment | str,
    ) -> None:
        known = delta_tasks.canonical(layout.id, layout.view)
        with memoryview(segment.view) as view, _delta(shard, source) as delta:
            await _apart(delta_tasks.patch, view, index, known, delta)

    def warm(self) -> None:
        self.warmed = True

    def forget(self, segment_id: str) -> asyncio.Future[list[None]]:
        self.forgotten.append(segment_id)
        done: asyncio.Future[list[None]] = asyncio.get_running_loop().create_future()
        done.set_result([])
        return done


async def _apart(function: Callable[..., Any], *args: Any) -> Any:
    """Work in a thread and bring errors back without the memory that their tracebacks hold."""

    def work() -> tuple[Any, WeightSyncError | None]:
        try:
            return function(*args, threading.Event()), None
        except WeightSyncError as error:
            return None, WeightSyncError(error.reason, error.message)

    result, error = await in_thread(work)
    if error is not None:
        raise error
    return result


def _delta(shard: ShardEntry, source: Segment | str) -> memoryview:
    if isinstance(source, str):
        return memoryview(Path(source).read_bytes())
    return memoryview(source.view)[: shard.size]


@contextlib.asynccontextmanager
async def real_fetchers(count: int = 1) -> AsyncIterator[FetcherPool]:
    pool = FetcherPool(count)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.stop()
