"""What the ranks have read is proved while they read on, and everything that they read is."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.engine.plant import KINDS, Engine, Plant, plant, tensors, until
from tests.unit.server.world import make_shard
from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.segment_socket import SegmentClient
from weightsync.shm.status_page import PageWriter
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from pathlib import Path

    from weightsync.model.manifest import ShardEntry
    from weightsync.shm.segments import Segment

_RANK = "0/0/0"


class Telling(Engine):
    """Tells how far it has read, and is ready when `go` is set.

    Attributes:
        reads: What it tells while a prepare is under way, one after the other.
        end: What it reports instead of being ready.
        told: All that was to be told so far was told.
        tickets: Of the prepares.
    """

    def __init__(self, socket: Path) -> None:
        super().__init__(socket)
        self.reads: list[Any] = []
        self.end: dict[str, Any] = {}
        self.told, self.go = asyncio.Event(), asyncio.Event()
        self.go.set()
        self.tickets: list[str] = []
        self._jobs: list[asyncio.Task[None]] = []

    async def call_workers(self, method: str, args: Mapping[str, Any]) -> Any:
        if method == "weightsync_capture":
            return await self._around("capture", self._captured())
        if method != "weightsync_prepare":
            return await super().call_workers(method, args)
        self.tickets.append(args["ticket"])
        self._jobs.append(asyncio.create_task(self._read_on(args)))
        return [{"ok": True, "rank": _RANK}]

    async def _captured(self) -> list[dict[str, Any]]:
        return [{"ok": True, "rank": _RANK}]

    async def _read_on(self, args: Mapping[str, Any]) -> None:
        page = await asyncio.to_thread(self._opened, f"{args['page']}/{_RANK}")
        running = {"ticket": args["ticket"], "phase": "running"}
        try:
            page.write(running)
            for read in self.reads:
                page.write({**running, "read": read})
                await asyncio.sleep(0.02)
            self.told.set()
            await self.go.wait()
            if self.end:
                end, self.end = self.end, {}
                page.write({**running, **end})
                return
        finally:
            page.close()
        await super().call_workers("weightsync_prepare", args)

    def _opened(self, name: str) -> PageWriter:
        with SegmentClient(self._socket) as client:
            ((fd, _),) = client.map([name])
        return PageWriter(fd)


class Digests:
    """Looks at the digests that a server's fetchers make."""

    def __init__(self, it: Plant) -> None:
        self._it = it
        self._digest = it.here.fetchers.digest
        it.here.fetchers.digest = self.digest  # type: ignore[method-assign]
        #: Names of shards, in the order in which their digests were begun.
        self.begun: list[str] = []
        self.ended: list[str] = []
        #: Leases on version 2 at the end of each.
        self.leases: list[int] = []
        self.go = asyncio.Event()
        self.go.set()

    async def digest(self, segment: Segment, shard: ShardEntry) -> list[bytes]:
        self.begun.append(shard.name)
        try:
            await self.go.wait()
            return await self._digest(segment, shard)
        except asyncio.CancelledError:
            # As a fetcher, which notices it a little later.
            await asyncio.sleep(0.05)
            raise
        finally:
            self.ended.append(shard.name)
            self.leases.append(self._it.leases()[2])


@pytest.fixture
async def it(tmp_path: Path) -> AsyncIterator[Plant]:
    async with plant(tmp_path, Telling(tmp_path / "segments.sock")) as made:
        await made.ready()
        await made.here.push(_shards(), 2)
        yield made


@pytest.fixture
def engine(it: Plant) -> Telling:
    assert isinstance(it.engine, Telling)
    return it.engine


@pytest.fixture
def digests(it: Plant) -> Digests:
    return Digests(it)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    monkeypatch.setattr(failpoints, "_plan", failpoints._Plan(""))
    return failpoints.set_plan


def _shards() -> list[Any]:
    """Return version 2 in a shard per tensor."""
    return [
        make_shard(index, [(name, *KINDS[name], data)])
        for index, (name, data) in enumerate(tensors(2).items())
    ]


def _names(it: Plant) -> list[str]:
    manifest = it.here.model.table.get(2).manifest
    assert manifest is not None
    return [shard.name for shard in manifest.layout.shards]


def _damage(it: Plant, shard: int) -> None:
    slot = it.here.model.table.get(2).slot
    assert slot is not None
    manifest = it.here.model.table.get(2).manifest
    assert manifest is not None
    slot.ordered()[shard].view[manifest.layout.shards[shard].size - 1] ^= 1


async def test_shards_are_proved_while_the_ranks_read_on(
    it: Plant, engine: Telling, digests: Digests
) -> None:
    first, second, third = _names(it)
    engine.go.clear()
    engine.reads = [0, 1, 2, 1]
    task = asyncio.create_task(it.apply(2))
    await until(lambda: digests.ended == [first, second])
    await engine.told.wait()
    await asyncio.sleep(0.02)
    assert not task.done()
    assert digests.begun == [first, second]
    engine.go.set()
    assert (await task).outcome == pb.APPLY_OUTCOME_APPLIED
    assert digests.begun == [first, second, third]
    assert engine.serves == 2
    assert it.leases() == {1: 0, 2: 1}


@pytest.mark.parametrize("reads", [[], ["3"], [None], [-1], [2.0]])
async def test_an_engine_that_tells_nothing_is_waited_for(
    it: Plant, engine: Telling, digests: Digests, reads: list[Any]
) -> None:
    engine.go.clear()
    engine.reads = reads
    task = asyncio.create_task(it.apply(2))
    await engine.told.wait()
    await asyncio.sleep(0.05)
    assert not digests.begun
    engine.go.set()
    await task
    assert digests.begun == _names(it)


@pytest.mark.parametrize("shard", [0, 1, 2])
async def test_damage_in_a_shard_that_is_read_early_or_late_is_found_and_named(
    it: Plant, engine: Telling, shard: int
) -> None:
    engine.reads = [2]
    _damage(it, shard)
    with pytest.raises(WeightSyncError, match=f'tensor "{"abc"[shard]}"') as caught:
        await it.apply(2)
    assert caught.value.reason is Reason.DATA_CORRUPT
    assert engine.serves == it.here.model.serving.live == 1
    assert engine.calls[-1] == "release"
    assert it.leases() == {1: 1}, "it is no longer staged, and nobody holds its slot"


@pytest.mark.parametrize("how", ["refused", "late", "failpoint"])
async def test_a_lease_outlasts_the_digests_of_an_apply_that_fails(
    it: Plant, engine: Telling, digests: Digests, plan: Callable[[str], None], how: str
) -> None:
    engine.reads = [2]
    digests.go.clear()
    fields: dict[str, Any] = {}
    if how == "refused":
        engine.end = {"phase": "failed", "error": "no", "refused": True}
    elif how == "late":
        engine.go.clear()
        fields["prepare_timeout"] = {"nanos": 300_000_000}
    else:
        plan("stage.verify=1*error(EIO)")
    with pytest.raises(WeightSyncError):
        await it.apply(2, **fields)
    assert len(digests.begun) >= 2
    assert sorted(digests.ended) == sorted(digests.begun)
    assert set(digests.leases) == {1}
    assert it.leases() == {1: 1, 2: 0}
    assert engine.serves == 1
    engine.go.set()
    digests.go.set()
    await it.ready()
    assert (await it.apply(2)).outcome == pb.APPLY_OUTCOME_APPLIED


async def test_ranks_that_read_anew_are_proved_anew(
    it: Plant, engine: Telling, digests: Digests
) -> None:
    engine.reads = [3]
    engine.end = {"phase": "needs_capture"}
    # Between the first digests and the second reads.
    engine.before["capture"] = lambda: _damage(it, 1)
    with pytest.raises(WeightSyncError, match='tensor "b"') as caught:
        await it.apply(2)
    assert caught.value.reason is Reason.DATA_CORRUPT
    assert len(set(engine.tickets)) == len(engine.tickets)
    assert len(digests.begun) == 6
    assert engine.serves == 1


async def test_nodes_stage_before_a_capture_pauses(
    it: Plant, engine: Telling, digests: Digests, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.reads = [3]
    engine.end = {"phase": "needs_capture"}
    assert it.keeper._session is not None
    ranks = it.keeper._session.ranks
    stage = ranks.stage

    async def staged(*args: Any) -> None:
        engine.calls.append("stage")
        await stage(*args)

    monkeypatch.setattr(ranks, "stage", staged)
    before = len(engine.calls)
    assert (await it.apply(2)).outcome == pb.APPLY_OUTCOME_APPLIED
    made = [call for call in engine.calls[before:] if call in ("stage", "pause", "capture")]
    # It pauses once more for the apply itself.
    assert made == ["stage", "pause", "capture", "pause"]


async def test_a_resume_after_a_capture_is_tried_again(
    it: Plant, engine: Telling, digests: Digests
) -> None:
    engine.reads = [3]
    engine.end = {"phase": "needs_capture"}

    def once() -> None:
        engine.before.pop("resume")
        raise WeightSyncError(Reason.ENGINE_AWAY, "the request was lost")

    engine.before["resume"] = once
    assert (await it.apply(2)).outcome == pb.APPLY_OUTCOME_APPLIED
    assert engine.calls.count("capture") == 1
    assert engine.serves == 2


async def test_a_comparison_proves_nothing_of_what_is_staged(
    it: Plant, engine: Telling, digests: Digests
) -> None:
    engine.reads = [3]
    assert not (await it.verify(2)).verified
    assert not digests.begun
