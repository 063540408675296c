"""Hostile PushWeights streams against a real ingest: real segments, a real store, no network."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from tests.support.deltas import delta_begin, delta_of, stepped
from tests.unit.server.world import (
    MODEL,
    World,
    begin,
    content,
    sending,
    simple,
    world,
)
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.digest import content_digest, tensor_digest
from weightsync.model.layout import parse_header
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightsync_server.catalog.record import VersionRecord

__all__ = ["Hostile", "conversations", "play"]

Message = pb.PushWeightsRequest
#: Stands for the id of the push that was opened last.
_LAST = "the last one"
#: Longest time until a busy machine has closed the last segment, seconds.
_LET_GO_S = 10.0

#: The version that is live, and that deltas are of.
_SERVED = simple(99, shards=1, size=64)

_numbers = st.sampled_from([0, 1, 2, 3, 7, 100, 1000, 1 << 20, (1 << 32) - 1])
_longs = _numbers | st.sampled_from(
    [1 << 40, 1 << 46, (1 << 53) - 1, 1 << 53, 1 << 63, (1 << 64) - 1]
)
_texts = st.sampled_from(["", "s0.a", "../../etc/passwd", "a\0b", "\u202e", "m", "F32", "x" * 2000])
_digests = st.sampled_from(["", "0" * 32, "md5:" + "0" * 32, "A" * 32])
_bytes = st.binary(max_size=40) | st.integers(0, 3 << 20).map(bytes)

_tensors = st.builds(
    pb.TensorSpec,
    name=_texts,
    dtype=_texts,
    shape=st.lists(_longs, max_size=4),
    begin=_longs,
    end=_longs,
)
_begins = st.builds(
    pb.BeginPushRequest,
    model=st.sampled_from([MODEL, MODEL, "other", "../m"]),
    version=_longs,
    epoch=_numbers,
    kind=st.sampled_from([0, 0, 1, 2, 9]),
    base_content_digest=_digests | st.just(content(_SERVED)),
    idempotency_key=_texts,
    layout_digest=_digests,
    total_bytes=_longs,
    shard_count=_numbers,
    metadata=st.dictionaries(_texts, _texts, max_size=2),
)
_messages = st.one_of(
    st.just(Message()),
    st.builds(Message, begin=_begins),
    st.builds(Message, join=st.builds(pb.JoinPush, push_id=st.just(_LAST) | _texts)),
    st.builds(
        Message,
        layout=st.builds(
            pb.LayoutPart,
            shard=_numbers,
            shard_name=_texts,
            size_bytes=_longs,
            header_bytes=_longs,
            tensors=st.lists(_tensors, max_size=2),
            last=st.booleans(),
        ),
    ),
    st.builds(Message, chunk=st.builds(pb.Chunk, shard=_numbers, offset=_longs, data=_bytes)),
    st.builds(
        Message,
        digests=st.builds(pb.ShardDigests, shard=_numbers, first=_numbers, digests=_bytes),
    ),
    st.builds(
        Message,
        commit=st.builds(
            pb.CommitPushRequest,
            push_id=st.just(_LAST) | _texts,
            content_digest=_digests,
            shard_count=_numbers,
        ),
    ),
)


@dataclass
class Hostile:
    """What one caller sends.

    Attributes:
        messages: On one stream.
        commit: Call CommitPush afterwards.
        together: Do not wait for the end of the stream before the next caller comes.
    """

    messages: list[pb.PushWeightsRequest] = field(default_factory=list)
    commit: bool = False
    together: bool = False


def _good(seed: int) -> list[pb.PushWeightsRequest]:
    shards = simple(seed, shards=1 + seed % 2, size=64)
    messages = [Message(begin=begin(version=seed % 3, shard_count=(seed // 2 % 2) * len(shards)))]
    for shard in shards:
        messages += [*shard.layout(), *shard.chunks(200), *shard.given()]
    return [*messages, Message(commit=pb.CommitPushRequest())]


def _good_delta(seed: int) -> list[pb.PushWeightsRequest]:
    new = stepped(_SERVED, seed, 0.05 * seed)
    shards = delta_of(_SERVED, new, 1 + seed % 2, zstd=bool(seed % 3))
    fields = delta_begin(_SERVED, version=seed % 3, shard_count=(seed // 2 % 2) * len(shards))
    messages = [Message(begin=begin(**fields))]
    for shard in shards:
        messages += [*shard.layout(), *shard.chunks(200), *shard.given()]
    return [*messages, Message(commit=pb.CommitPushRequest(content_digest=content(new)))]


@st.composite
def _streams(draw: st.DrawFn) -> Hostile:
    """Draw a legal stream in which a few things are wrong."""
    good = draw(st.sampled_from([_good, _good_delta]))
    messages = good(draw(st.integers(0, 12)))
    if draw(st.booleans()):
        messages[0] = Message(join=pb.JoinPush(push_id=_LAST))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(messages) - 1))
        messages[at : at + 1] = _changed(draw, messages, at)
        messages = messages or [draw(_messages)]
    return Hostile(messages, draw(st.booleans()), draw(st.booleans()))


def _changed(
    draw: st.DrawFn, messages: Sequence[pb.PushWeightsRequest], at: int
) -> list[pb.PushWeightsRequest]:
    """Return what takes the place of one message."""
    message = messages[at]
    how = draw(st.integers(0, 4))
    if how == 0:
        return []
    if how == 1:
        return [message, message]
    if how == 2:
        return [_flipped(message, draw)]
    if how == 3:
        return [draw(_messages), message]
    return [draw(st.sampled_from(messages))]


def _flipped(message: pb.PushWeightsRequest, draw: st.DrawFn) -> pb.PushWeightsRequest:
    """Return the message with one byte of its serialised form changed, if that is a message."""
    data = bytearray(message.SerializeToString())
    if data:
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    try:
        return Message.FromString(bytes(data))
    except Exception:  # noqa: BLE001 - gRPC refuses what does not parse before our code sees it
        return message


conversations = st.lists(_streams(), min_size=1, max_size=4)


async def _attempt(here: World, caller: Hostile) -> None:
    refused = None
    try:
        messages = [_addressed(here, message) for message in caller.messages]
        await here.pushes.stream(sending(messages), 5.0)
        if caller.commit:
            await here.pushes.commit(pb.CommitPushRequest(push_id=_newest(here)))
    except WeightSyncError as error:
        # Anything else would reach the caller as a fault of the server.
        refused = error
    if refused is not None:
        assert refused.reason is not Reason.FAULT, refused
        assert len(refused.message) < 4000, len(refused.message)


def _newest(here: World) -> str:
    pushes = here.pushes.status()
    return pushes[-1].push_id if pushes else "none"


def _addressed(here: World, message: pb.PushWeightsRequest) -> pb.PushWeightsRequest:
    for name in ("join", "commit"):
        if message.HasField(name) and getattr(message, name).push_id == _LAST:
            copy = Message()
            copy.CopyFrom(message)
            getattr(copy, name).push_id = _newest(here)
            return copy
    return message


async def play(callers: Sequence[Hostile]) -> int:
    """Let hostile callers speak to a fresh ingest; returns how many versions it committed.

    Raises:
        AssertionError: An error of ours, a half version, a changed one, or something left behind.
    """
    before = _segments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        limits = {"slot_wait_s": 0.01, "stream_idle_timeout_s": 5.0}
        async with world(folder, limits=limits, memory=64 << 20) as here:
            await here.push(_SERVED, 1)
            here.model.serving.engine("engine").set_live(1)
            running = []
            for caller in callers:
                running.append(asyncio.create_task(_attempt(here, caller)))
                if not caller.together:
                    await asyncio.gather(*running)
            await asyncio.gather(*running)
            assert here.read(1) == [shard.data for shard in _SERVED], "the served version changed"
            versions = await _settled(here, folder)
            budget = here.budget
        assert budget.reserved == 0, f"{budget.reserved} bytes stay reserved"
    assert await asyncio.to_thread(_given_back, before), "segments stay"
    return versions


async def _settled(here: World, folder: Path) -> int:
    """Drop what is open and compare what is committed with its digests and the store's files."""
    for push in here.pushes.status():
        await here.pushes.abort(pb.AbortPushRequest(push_id=push.push_id))
    await here.model.compactor.close()
    records = here.model.table.list()
    for record in records:
        assert record.commit is not None, f"version {record.version} is half"
        shards = await _stored(here, folder, record)
        assert _content(shards) == record.commit.content_digest, f"version {record.version}"
        if record.slot is not None:
            assert here.read(record.version) == shards
    found = {path.name for path in (folder / "store" / MODEL).iterdir() if path.is_dir()}
    assert found == {f"v{record.version}" for record in records}, found
    return len(records)


async def _stored(here: World, folder: Path, record: VersionRecord) -> list[bytes]:
    """Return the whole shards of a version: its files or, of a delta, what is made of them."""
    if record.base is None:
        stored = folder / "store" / MODEL / f"v{record.version}"
        count = record.commit.shard_count if record.commit else 0
        return [(stored / f"{index}.safetensors").read_bytes() for index in range(count)]
    if record.slot is not None:
        # What lies in memory must not vouch for the store.
        here.model.slots.release(record)
        record.residency = pb.RESIDENCY_ABSENT
        for slot in here.model.slots.slots:
            slot.trim()
    lease = await here.model.stager.stage(record.version, 5.0, for_engine=False)
    lease.release()
    return here.read(record.version)


def _content(shards: Sequence[bytes]) -> str:
    tensors = []
    for shard in shards:
        start = 8 + int.from_bytes(shard[:8], "little")
        tensors += [
            (t.name, t.dtype, t.shape, tensor_digest(shard[start + t.begin : start + t.end]))
            for t in parse_header(shard[8:start])
        ]
    return content_digest(tensors)


def _given_back(before: int) -> bool:
    # A thread that was making or closing one when its push ended may still be at it.
    end = time.monotonic() + _LET_GO_S
    while _segments() != before and time.monotonic() < end:
        time.sleep(0.01)
    return _segments() == before


def _segments() -> int:
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        # The descriptor of the question itself is gone by now.
        with contextlib.suppress(FileNotFoundError):
            found += "memfd:weightsync" in str(entry.readlink())
    return found
