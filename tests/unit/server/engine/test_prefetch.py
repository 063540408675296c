"""Ranks read a version while it comes in: only what is proved, and only where it is of use."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.engine.plant import KINDS, Engine, Plant, plant, tensors, until
from tests.unit.server.world import Shard, begin, make_shard
from weightsync.engine import READ_AHEAD
from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.incoming_version import ArrivalReader
from weightsync.shm.segment_socket import SegmentClient
from weightsync.shm.segments import MappedSegment
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.engine import prefetch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


class Reader(Engine):
    """Has a device, and reads shards as they come until it is asked for something else.

    Attributes:
        room: Of its device, bytes.
        came: By the name of what was read ahead: the shards, as they came.
        prepared: What each prepare was told to have been read ahead.
    """

    def __init__(self, socket: Path) -> None:
        super().__init__(socket)
        self.room = 1 << 20
        self.came: dict[str, list[int]] = {}
        self.prepared: list[str] = []
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    async def hello(self) -> Any:
        info = await super().hello()
        return dataclasses.replace(info, capabilities=info.capabilities | {READ_AHEAD})

    def _ready(self, *args: Any) -> dict[str, Any]:
        return super()._ready(*args) | {"device_room": self.room}

    def _prepare(self, args: Any) -> dict[str, Any]:
        self.end()
        self.prepared.append(args["ahead"])
        return super()._prepare(args)

    def _ahead(self, args: Any) -> dict[str, Any]:
        name = str(args["apply_id"])
        self._ended = threading.Event()
        thread = threading.Thread(
            target=self._read_ahead, args=(name, str(args["document"]), self._ended)
        )
        thread.start()
        self._threads.append(thread)
        return {}

    def _read_ahead(self, name: str, document: str, ended: threading.Event) -> None:
        # Whoever comes too late finds nothing, and reads all when the version is prepared; at the
        # end of a test, when no server is there any more either.
        too_late = (LookupError, FileNotFoundError, ConnectionError)
        with contextlib.suppress(*too_late), SegmentClient(self._socket) as client:
            ((fd, size),) = client.map([document])
            mapped = MappedSegment(fd, size)
            reader = ArrivalReader(mapped.view)
            # What is told can be mapped.
            for fd, size in client.map(list(reader.segments)):
                MappedSegment(fd, size).close()
            # Only now: it cannot come too late any more.
            came = self.came[name] = []
            for shard, _ in reader.arrivals(ended.wait, 20):
                came.append(shard)

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(20)


@pytest.fixture
async def it(tmp_path: Path) -> AsyncIterator[Plant]:
    async with plant(tmp_path, Reader(tmp_path / "segments.sock")) as made:
        await made.ready()
        for version in (2, 3, 4):
            # The layout becomes known, and every slot has segments that fit.
            await made.here.push(_shards(version), version)
            await made.apply(version)
        _engine(made).prepared.clear()
        yield made
        _engine(made).end()


def _engine(it: Plant) -> Reader:
    assert isinstance(it.engine, Reader)
    return it.engine


def _shards(seed: int) -> list[Shard]:
    data = tensors(seed)
    return [
        make_shard(index, [(name, *KINDS[name], data[name]) for name in names])
        for index, names in enumerate((("a",), ("b", "c")))
    ]


def _layout(it: Plant) -> str:
    manifest = it.here.model.table.get(4).manifest
    assert manifest is not None
    return manifest.layout.digest


async def _begin(it: Plant, version: int, **fields: Any) -> str:
    request = begin(version=version, **{"layout_digest": _layout(it), **fields})
    response = await it.here.pushes.begin(request, 5.0)
    return str(response.push_id)


async def _send(it: Plant, push_id: str, shard: Shard) -> None:
    await it.here.join(push_id, shard.all())


async def _commit(it: Plant, push_id: str) -> None:
    await it.here.pushes.commit(pb.CommitPushRequest(push_id=push_id))


async def test_shards_are_told_as_they_come_and_the_apply_names_them(it: Plant) -> None:
    engine = _engine(it)
    push = await _begin(it, 5)
    await until(lambda: bool(engine.came))
    ((name, came),) = engine.came.items()
    await _send(it, push, _shards(5)[1])
    await until(lambda: came == [1])
    await _send(it, push, _shards(5)[0])
    await _commit(it, push)
    await until(lambda: came == [1, 0])
    await it.apply(5)
    assert engine.prepared == [name]
    assert engine.serves == 5


async def test_a_shard_that_is_not_proved_is_not_told(it: Plant) -> None:
    engine = _engine(it)
    push = await _begin(it, 5)
    await until(lambda: bool(engine.came))
    (came,) = engine.came.values()
    good, bad = _shards(5)
    wrong = dataclasses.replace(bad, digests=[b"\1" * 16] * len(bad.digests))
    await _send(it, push, good)
    await _send(it, push, wrong)
    with pytest.raises(WeightSyncError) as caught:
        await _commit(it, push)
    assert caught.value.reason is Reason.DIGEST_MISMATCH
    for thread in engine._threads:
        thread.join(20)
    # It was told that nothing more comes.
    assert came == [0]


async def test_what_was_read_of_one_version_is_not_named_for_another(it: Plant) -> None:
    engine = _engine(it)
    push = await _begin(it, 5)
    await until(lambda: bool(engine.came))
    await _send(it, push, _shards(5)[0])
    await it.here.pushes.abort(pb.AbortPushRequest(push_id=push))
    await it.here.push(_shards(6), 6)
    await it.apply(6)
    assert engine.prepared == [""]
    assert engine.serves == 6


async def test_a_rollback_is_made_of_what_lies_in_shared_memory(it: Plant) -> None:
    engine = _engine(it)
    push = await _begin(it, 5)
    await until(lambda: bool(engine.came))
    await it.rollback()
    assert (engine.prepared, engine.serves) == ([""], 3)
    await it.here.pushes.abort(pb.AbortPushRequest(push_id=push))


@pytest.mark.parametrize("why", ["layout", "room", "capability", "setting"])
async def test_nobody_reads_ahead_where_it_is_of_no_use(
    tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Reader(tmp_path / "segments.sock")
    if why == "capability":
        monkeypatch.setattr(Reader, "hello", Engine.hello)
    if why == "room":
        engine.room = 0
    async with plant(tmp_path, engine, read_ahead=why != "setting") as it:
        await it.ready()
        for version in (2, 3, 4):
            await it.here.push(_shards(version), version)
            await it.apply(version)
        named = {"layout_digest": ""} if why == "layout" else {}
        push = await _begin(it, 5, **named)
        for shard in _shards(5):
            await _send(it, push, shard)
        await _commit(it, push)
        await it.apply(5)
        assert engine.came == {}
        assert engine.serves == 5


async def test_a_rank_that_refuses_costs_nothing(it: Plant) -> None:
    engine = _engine(it)
    engine.after["ahead"] = lambda replies: [
        replies[0] | {"ok": False, "error": "apply x is still at work on this rank"}
    ]
    push = await _begin(it, 5)
    await until(lambda: "ahead" in engine.calls)
    for shard in _shards(5):
        await _send(it, push, shard)
    await _commit(it, push)
    await it.apply(5)
    assert engine.prepared == [""]
    assert engine.serves == 5


async def test_what_is_published_for_it_is_taken_back(it: Plant) -> None:
    engine = _engine(it)
    before = it.here.budget.reserved
    for version in (5, 6, 7):
        engine.came.clear()
        push = await _begin(it, version)
        await until(lambda: bool(engine.came))
        for shard in _shards(version):
            await _send(it, push, shard)
        await _commit(it, push)
        await it.apply(version)
    engine.end()
    await it.here.model.segments.unmapped()
    assert it.here.budget.reserved == before


async def test_other_bytes_on_a_device_fail_the_apply(it: Plant) -> None:
    engine = _engine(it)
    ready = engine._ready
    engine._ready = lambda *args: ready(*args) | {"shards": [0], "unlike": ["b", "c"]}  # type: ignore[method-assign]
    await it.here.push(_shards(5), 5)
    with pytest.raises(
        WeightSyncError, match="has different bytes of b, c on its device"
    ) as caught:
        await it.apply(5)
    assert caught.value.reason is Reason.DATA_CORRUPT
    assert engine.serves == 4
    engine._ready = ready  # type: ignore[method-assign]
    await it.apply(5)
    assert engine.serves == 5


async def test_damage_in_shared_memory_is_told_as_such(it: Plant) -> None:
    engine = _engine(it)
    ready = engine._ready
    engine._ready = lambda *args: ready(*args) | {"shards": [0], "unlike": ["b"]}  # type: ignore[method-assign]
    await it.here.push(_shards(5), 5)
    slot = it.here.model.table.get(5).slot
    assert slot is not None
    slot.ordered()[0].view[100] ^= 1
    with pytest.raises(WeightSyncError, match=r"bytes of tensor .a. in shared memory"):
        await it.apply(5)
    assert engine.serves == 4


async def test_what_ranks_have_proved_is_not_digested_again(it: Plant) -> None:
    engine = _engine(it)
    digest, begun = it.here.fetchers.digest, []

    async def noted(segment: Any, shard: Any) -> list[bytes]:
        begun.append(shard.name)
        return await digest(segment, shard)

    await it.here.push(_shards(5), 5)
    it.here.fetchers.digest = noted  # type: ignore[method-assign]
    ready = engine._ready
    engine._ready = lambda *args: ready(*args) | {"shards": [1]}  # type: ignore[method-assign]
    await it.apply(5)
    assert begun == ["model-0.safetensors"]


async def test_a_version_that_was_read_anew_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "_WAITS_S", 0.0)
    engine = Reader(tmp_path / "segments.sock")
    async with plant(tmp_path, engine, slots=2, store=f"file://{tmp_path}/store") as it:
        await it.ready()
        for version in (2, 3, 4):
            await it.here.push(_shards(version), version)
            await it.apply(version)
        push = await _begin(it, 5)
        await until(lambda: bool(engine.came))
        for shard in _shards(5):
            await _send(it, push, shard)
        await _commit(it, push)
        slot = it.here.model.table.get(5).slot
        # It loses its slot to one that nobody reads, and gets it again.
        await it.here.push(_shards(6), 6)
        assert it.here.model.table.get(5).slot is None
        engine.prepared.clear()
        await it.apply(5)
        assert it.here.model.table.get(5).slot is slot
        assert (engine.prepared, engine.serves) == ([""], 5)
        engine.end()


async def test_what_waits_for_its_apply_is_not_written_over(
    it: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _engine(it)
    pushes = {}
    for version in (5, 6):
        pushes[version] = await _begin(it, version)
        await until(lambda: len(engine.came) == 1)
        for shard in _shards(version):
            await _send(it, pushes[version], shard)
        if version == 5:
            await _commit(it, pushes[version])
    await asyncio.sleep(0.7)
    (first,) = engine.came
    await it.apply(5)
    assert engine.prepared == [first]
    # Now the ranks have time for the next one.
    await until(lambda: len(engine.came) == 2)
    await _commit(it, pushes[6])
    second = next(name for name in engine.came if name != first)
    await until(lambda: sorted(engine.came[second]) == [0, 1])
    await it.apply(6)
    assert engine.prepared == [first, second]
    assert engine.serves == 6


async def test_what_nobody_applies_is_not_waited_for(
    it: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "_WAITS_S", 0.1)
    engine = _engine(it)
    for count, version in enumerate((5, 6), 1):
        push = await _begin(it, version)
        await until(functools.partial(lambda count: len(engine.came) == count, count))
        for shard in _shards(version):
            await _send(it, push, shard)
        await _commit(it, push)


async def test_an_apply_of_another_version_interrupts_and_it_goes_on(it: Plant) -> None:
    engine = _engine(it)
    push = await _begin(it, 5)
    await until(lambda: bool(engine.came))
    (name,) = engine.came
    await _send(it, push, _shards(5)[0])
    await it.verify()
    engine.came.clear()
    # Under the same name: what the ranks still have of it they do not read again.
    await until(lambda: list(engine.came) == [name])
    await _send(it, push, _shards(5)[1])
    await _commit(it, push)
    await it.apply(5)
    assert engine.prepared == [name]
