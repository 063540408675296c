"""The engines of a host as its fleet's member drives them: real ranks, journal and gate."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.engine.plant import Engine, engine_set, hurry, limits, shards, until
from tests.unit.server.world import MODEL, World, world
from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.decide import FleetVersion
from weightsync_server.engine import (
    Applier,
    EngineContext,
    EngineSet,
    JournalFile,
)
from weightsync_server.fleet_host.fleet_host import LocalHost
from weightsync_server.ops.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from weightsync_server.replicate.follower import Follower


class Site:
    """A server in a fleet with one engine or several; engines outlive it, as processes do."""

    def __init__(self, here: World, engines: dict[str, Engine], known: EngineSet) -> None:
        self.here, self.engines, self.known = here, engines, known
        self.host: LocalHost
        self.follower: Follower | None = None
        self.applier: Applier

    def version(self, seed: int) -> FleetVersion:
        record = self.here.model.table.get(seed)
        return FleetVersion(record.version, record.content_digest)

    async def push(self, *seeds: int) -> None:
        for seed in seeds:
            await self.here.push(shards(seed), seed)

    def serves(self) -> set[int]:
        return {engine.serves for engine in self.engines.values()}

    async def up(self) -> None:
        """Be let serve what is there, as by a fleet that has decided nothing."""
        await until(lambda: self.host.live() is not None)
        await self.host.resume()


@contextlib.asynccontextmanager
async def site(folder: Path, engines: dict[str, Engine]) -> AsyncIterator[Site]:
    async with world(folder, store=f"file://{folder / 'store'}", slots=3) as here:
        file = JournalFile(folder / "journal", here.model.store.url)
        shared = EngineContext(here.model, here.server, Metrics(MODEL), limits(), fleet="f")
        known = engine_set(file, engines, shared)
        it = Site(here, engines, known)
        it.applier = Applier(known, shared)
        it.host = LocalHost(known, shared, undecided_s=3, source=lambda: it.follower)
        await it.host.begin()
        known.start()
        try:
            yield it
        finally:
            await it.host.stop()
            await known.stop()
            file.close()


@contextlib.asynccontextmanager
async def serving(folder: Path, engines: dict[str, Engine], *pushed: int) -> AsyncIterator[Site]:
    """A site that serves version 1, and to which others are pushed."""
    async with site(folder, engines) as it:
        await it.up()
        await it.push(*pushed)
        yield it


@contextlib.asynccontextmanager
async def prepared(folder: Path, engines: dict[str, Engine]) -> AsyncIterator[Site]:
    """A site that serves version 1 and has prepared version 2."""
    async with serving(folder, engines, 2) as it:
        await it.host.prepare(it.version(2))
        yield it


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


async def test_nothing_is_served_before_the_member_has_spoken(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with site(tmp_path, engines) as it:
        await until(lambda: it.host.live() is not None)
        await asyncio.sleep(0.3)
        assert it.serves() == {0}
        await it.host.resume()
        assert it.serves() == {1}


async def test_a_barrier_that_is_committed(tmp_path: Path, engines: dict[str, Engine]) -> None:
    async with prepared(tmp_path, engines) as it:
        assert it.serves() == {1}
        await it.host.pause()
        assert it.serves() == {0}
        assert it.host.live() == it.version(1)
        await it.host.commit(it.version(2))
        assert it.serves() == {2}
        assert it.host.live() == it.version(2)


async def test_a_barrier_that_is_called_off_rejects_nothing(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with prepared(tmp_path, engines) as it:
        await it.host.pause()
        await it.host.resume()
        assert it.serves() == {1}
        assert it.here.model.table.get(2).serving != pb.SERVING_REJECTED
        # And once more, without a pause of its own.
        await it.host.prepare(it.version(2))
        await it.host.commit(it.version(2))
        assert it.serves() == {2}


@pytest.mark.parametrize("target", [2, 1])
async def test_what_a_caller_was_cancelled_in_is_done_once(
    tmp_path: Path, engines: dict[str, Engine], target: int
) -> None:
    async with serving(tmp_path, engines) as it:
        if target == 2:
            await it.push(2)
            await it.host.prepare(it.version(2))
        for name in ("pause", "resume"):
            for engine in engines.values():
                engine.before[name] = lambda: asyncio.sleep(0.1)
        for step in (it.host.pause, lambda: it.host.commit(it.version(target))):
            calling = asyncio.create_task(step())
            await asyncio.sleep(0.05)
            calling.cancel()
            await asyncio.wait({calling})
            await step()
        assert it.serves() == {target}
        paused = [event for engine in engines.values() for event in engine.events]
        assert paused.count("pause") == len(engines)


async def test_a_barrier_to_what_is_live_pauses_and_fences_nothing(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with serving(tmp_path, engines) as it:
        await it.host.prepare(it.version(1))
        for engine in engines.values():
            engine.events.clear()
        await it.host.pause()
        assert it.serves() == {0}
        await it.host.commit(it.version(1))
        assert it.serves() == {1}
        for engine in engines.values():
            assert "pause" in engine.events
            assert "fence" not in engine.events


async def test_what_was_prepared_is_dropped(tmp_path: Path, engines: dict[str, Engine]) -> None:
    async with serving(tmp_path, engines, 2, 3) as it:
        await it.host.prepare(it.version(2))
        await it.host.prepare(it.version(3))
        await it.host.resume()
        assert it.serves() == {1}
        await until(lambda: all(not one.progress.apply_id for one in it.known.supervisors))
        await it.host.commit(it.version(2))
        assert it.serves() == {2}


async def _set(event: asyncio.Event) -> None:
    await event.wait()


async def test_what_was_prepared_is_dropped_also_if_its_caller_is_cancelled(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with prepared(tmp_path, engines) as it:
        await it.push(3)
        released = asyncio.Event()
        for engine in engines.values():
            engine.before["release"] = lambda: _set(released)
        calling = asyncio.create_task(it.host.prepare(it.version(3)))
        await asyncio.sleep(0.05)
        calling.cancel()
        await asyncio.wait({calling}, timeout=5)
        assert calling.cancelled()
        released.set()
        await until(lambda: all(not one.progress.apply_id for one in it.known.supervisors))
        # No slot is kept of what no engine goes to, nor is any engine asked anew.
        held = {slot.version: slot.leases for slot in it.here.model.slots.status()}
        assert not held[2]
        assert it.serves() == {1}
        await it.host.prepare(it.version(3))
        await it.host.pause()
        await it.host.commit(it.version(3))
        assert it.serves() == {3}


@pytest.mark.parametrize("decided", [1, 2])
async def test_a_fence_while_undecided_lasts_until_the_decision(
    tmp_path: Path, engines: dict[str, Engine], decided: int
) -> None:
    async with prepared(tmp_path, engines) as it:
        await it.host.pause()
        await it.host.fence("nobody tells what was decided")
        await until(lambda: it.host.live() is not None)
        await asyncio.sleep(0.5)
        assert it.serves() == {0}
        assert it.host.live() == it.version(1)
        if decided == 2:
            await it.host.prepare(it.version(2))
            await it.host.commit(it.version(2))
        else:
            await it.host.resume()
        assert it.serves() == {decided}
        await it.here.model.stager.stage(1, 5)


async def test_a_decision_that_comes_right_after_a_fence_is_served(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with serving(tmp_path, engines, 2) as it:
        for engine in engines.values():
            # The ranks are asked, and the version before is about to be written.
            engine.before["prepare"] = lambda: asyncio.sleep(0.05)
        await it.host.prepare(it.version(2))
        await it.host.pause()
        await it.host.fence("nobody tells what was decided")
        await asyncio.sleep(0.03)
        await it.host.commit(it.version(2))
        assert it.serves() == {2}
        for _ in range(10):
            await asyncio.sleep(0.05)
            assert it.serves() == {2}


async def test_a_server_that_dies_while_paused_comes_back_and_asks(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with prepared(tmp_path, engines) as it:
        await it.host.pause()
    assert {engine.serves for engine in engines.values()} == {0}
    async with site(tmp_path, engines) as it:
        await until(lambda: it.host.live() is not None)
        await asyncio.sleep(0.5)
        assert it.serves() == {0}
        # Nothing was decided here: it holds what it held before.
        assert it.host.live() == it.version(1)
        await it.host.prepare(it.version(2))
        await it.host.commit(it.version(2))
        assert it.serves() == {2}


async def test_an_engine_that_cannot_prove_takes_the_host_back(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with prepared(tmp_path, engines) as it:
        it.engines["e0"].wrong = [b"\x09" * 256]
        with pytest.raises(WeightSyncError) as caught:
            await it.host.pause()
        assert caught.value.reason is Reason.APPLY_RESTORED
        assert it.serves() == {1}


async def test_a_commit_that_fails_serves_nothing(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with prepared(tmp_path, engines) as it:
        it.engines["e0"].wrong = [b"\x09" * 256]
        with pytest.raises(WeightSyncError):
            await it.host.commit(it.version(2))
        await asyncio.sleep(0.3)
        assert it.serves() == {0}
        await until(lambda: it.host.live() == it.version(1))
        await it.host.resume()
        assert it.serves() == {1}


@pytest.mark.parametrize("prepares", [True, False], ids=["prepared", "placed"])
async def test_a_host_that_stands_still_just_before_it_serves_does_not(
    tmp_path: Path, engines: dict[str, Engine], prepares: bool
) -> None:
    async with prepared(tmp_path, engines) as it:
        time = it.known.supervisors[0].context.serving_time
        until_s: list[float] = []

        def ask(_: object) -> float:
            if not until_s:
                until_s.append(clock.boottime() + 0.5)
            return until_s[0] - clock.boottime()

        async def stands_still() -> None:
            # As a process that is stopped after it was let serve, until others go on without it.
            engine.before.pop("resume")
            await asyncio.sleep(0.6)

        engine = engines["e0"]
        if prepares:
            await it.host.pause()
        else:
            await it.host.fence("it comes late")
        time.begins_s, engine.before["resume"] = ask, stands_still
        with pytest.raises(WeightSyncError):
            await it.host.commit(it.version(2))
        assert it.serves() == {0}
        time.begins_s = lambda _: 5.0
        await it.host.commit(it.version(2))
        assert it.serves() == {2}


async def test_a_host_whose_engines_are_dead_says_so_at_once(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with serving(tmp_path, engines, 2) as it:
        # Else it would be waited for an hour.
        it.host._limits = limits(prepare_timeout_s=3600.0)

        def dead() -> None:
            raise WeightSyncError(Reason.ENGINE_AWAY, "connection refused")

        for engine in engines.values():
            engine.before |= dict.fromkeys(("health", "hello", "fence", "pause"), dead)
        await it.host.fence("the fleet decided another version")
        for call in (it.host.prepare(it.version(2)), it.host.commit(it.version(2))):
            with pytest.raises(WeightSyncError, match="start vLLM, or stop this member") as caught:
                await call
            assert caught.value.reason is Reason.ENGINE_AWAY
        for engine in engines.values():
            engine.before.clear()
        await it.host.commit(it.version(2))
        assert it.serves() == {2}


async def test_a_decision_that_the_disk_refuses_is_written_again(
    tmp_path: Path, engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with prepared(tmp_path, engines) as it:
        await it.host.pause()
        write = it.known.journal.write
        refused: list[Any] = []

        def full_once(entry: Any) -> None:
            if entry.event == "COMMIT" and not refused:
                refused.append(entry)
                raise OSError(28, "No space left on device")
            write(entry)

        monkeypatch.setattr(it.known.journal, "write", full_once)
        await it.host.commit(it.version(2))
        assert len(refused) == 1
        assert it.serves() == {2}


async def test_it_rejects_by_content_and_knows_what_is_not_here(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with serving(tmp_path, engines, 2) as it:
        await it.host.reject(it.version(2).digest, "bad answers")
        assert it.here.model.table.get(2).serving == pb.SERVING_REJECTED
        assert it.here.model.table.get(2).rejected_reason == "bad answers"
        for _ in range(2):
            await it.host.accept(it.version(2).digest)
            assert it.here.model.table.get(2).serving != pb.SERVING_REJECTED
        await it.host.accept("ab" * 16)
        with pytest.raises(WeightSyncError, match="start this server with --follow") as caught:
            await it.host.prepare(FleetVersion(7, "ab" * 16))
        assert caught.value.reason is Reason.VERSION_UNKNOWN
        assert await it.host.find(2) == it.version(2)
        with pytest.raises(WeightSyncError) as caught:
            await it.host.find(7)
        assert caught.value.reason is Reason.VERSION_UNKNOWN
        it.here.model.table.get(2).commit = None
        with pytest.raises(WeightSyncError, match="is not committed yet") as caught:
            await it.host.find(2)
        assert caught.value.reason is Reason.VERSION_NOT_DURABLE
        assert it.serves() == {1}


async def test_only_the_fleet_makes_versions_live(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with serving(tmp_path, engines, 2) as it:
        with pytest.raises(WeightSyncError, match="use `weightsync fleet apply`") as caught:
            await it.applier.apply(pb.ApplyVersionRequest(model=MODEL, version=2))
        assert caught.value.reason is Reason.NOT_SUPPORTED
        with pytest.raises(WeightSyncError, match="use `weightsync fleet rollback`"):
            await it.applier.rollback(pb.RollbackRequest(model=MODEL))
        plan = await it.applier.apply(pb.ApplyVersionRequest(model=MODEL, version=2, dry_run=True))
        assert plan.report.outcome == pb.APPLY_OUTCOME_PLANNED
        assert it.serves() == {1}


@pytest.mark.parametrize("before", ["prepared", "overdue", "serves"])
async def test_one_that_comes_late_serves_nothing_on_the_caches_of_before(
    tmp_path: Path, engines: dict[str, Engine], before: str
) -> None:
    async with serving(tmp_path, engines, 2) as it:
        if before == "overdue":
            for engine in engines.values():
                engine._out_of_time()
            assert it.serves() == {0}
        elif before == "prepared":
            await it.host.fence("it comes late")
            await it.host.prepare(it.version(2))
        await it.host.commit(it.version(2))
        assert it.serves() == {2}
        assert [engine.stale for engine in engines.values()] == [[]] * len(engines)
