"""Versions that ranks load beside generation: real ranks, pages and slots, and an engine that tells
what a test says.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.clocks import Clocks
from tests.unit.server.engine.plant import until
from tests.unit.server.world import MODEL, World, simple, world
from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.segment_socket import SegmentClient
from weightsync.shm.status_page import PageWriter
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.engine import version_loads
from weightsync_server.engine.ranks import Ranks
from weightsync_server.engine.version_loads import EngineLiveness, LoadScheduler
from weightsync_server.engine.worker_reports import NoPlan
from weightsync_server.nodes import EngineNodes, NodeGroup
from weightsync_server.ops.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.residency.slot import SlotLease

NAMES = ("0/0/0", "0/0/1")


class Loaders:
    """An engine whose ranks load when a test says so.

    Attributes:
        asked: Arguments of every load.
        refusal: What the ranks answer to the call itself; empty: they begin.
        presence: How this start of vLLM is.
        over: Whether the ranks refuse the group of the next load.
    """

    def __init__(self, here: World) -> None:
        self._socket = here.server.path
        self.asked: list[dict[str, Any]] = []
        self.refusal: dict[str, Any] = {}
        self.presence = EngineLiveness.HERE
        self.over = False

    async def call_workers(self, method: str, args: dict[str, Any]) -> list[dict[str, Any]]:
        assert method == "weightsync_load"
        self.asked.append(args)
        if self.over:
            self.over = False
            return [{"ok": False, "rank": name, "error": "the group is over"} for name in NAMES]
        return [{"ok": True, "rank": name} | self.refusal for name in NAMES]

    async def look(self) -> EngineLiveness:
        return self.presence

    async def loads(self, count: int) -> None:
        """Wait until that many loads were begun."""
        await until(lambda: len(self.asked) >= count)

    def tell(self, *ranks: dict[str, Any]) -> None:
        """Write what each rank tells of the newest load."""
        args = self.asked[-1]
        with SegmentClient(self._socket) as client:
            mapped = client.map([f"{args['page']}/{name}" for name in NAMES])
        for (fd, _), told in zip(mapped, ranks, strict=False):
            page = PageWriter(fd)
            page.write({"ticket": args["ticket"], "phase": "running"} | told)
            page.close()

    def ready(self, *held: str, **more: Any) -> None:
        """Let every rank end the newest load, and hold these contents."""
        told = {"phase": "ready", "held": list(held), "load_s": 2.5, "arena_bytes": 100} | more
        self.tell(told, told)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_loads, "_POLL_S", 0.005)
    monkeypatch.setattr(version_loads, "_AGAIN_S", 0.05)


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path, store="memory://", slots=3) as made:
        await made.push(simple(2), 2)
        await made.push(simple(3), 3)
        yield made


@pytest.fixture
def engine(here: World) -> Loaders:
    return Loaders(here)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(MODEL)


@pytest.fixture
async def loads(here: World, engine: Loaders, metrics: Metrics) -> AsyncIterator[LoadScheduler]:
    nodes = EngineNodes(NodeGroup(here.server), engine, 1, NAMES)
    ranks = Ranks(engine, NAMES, here.server, nodes)  # type: ignore[arg-type]
    made = LoadScheduler(
        ranks, here.model.stager, metrics.loaders, NoPlan("it quantises"), engine.look
    )
    yield made
    made.close()
    await asyncio.sleep(0)
    ranks.close()


@pytest.fixture
def two(here: World) -> VersionRecord:
    return here.model.table.get(2)


@pytest.fixture
def three(here: World) -> VersionRecord:
    return here.model.table.get(3)


async def _loaded(loads: LoadScheduler, engine: Loaders, record: VersionRecord) -> None:
    count = len(engine.asked)
    task = asyncio.create_task(loads.ensure(record, 10))
    await engine.loads(count + 1)
    engine.ready(record.content_digest)
    await task


async def _fail(
    loads: LoadScheduler, engine: Loaders, record: VersionRecord, **told: Any
) -> WeightSyncError:
    count = len(engine.asked)
    task = asyncio.create_task(loads.ensure(record, 10))
    await engine.loads(count + 1)
    engine.tell({}, {"phase": "failed", "error": "it ended with status 9"} | told)
    with pytest.raises(WeightSyncError) as caught:
        await task
    return caught.value


def _states(loads: LoadScheduler) -> list[int]:
    return [status.state for status in loads.status().values()]


async def test_ensure_returns_when_every_rank_has_loaded(
    here: World, loads: LoadScheduler, engine: Loaders, two: VersionRecord
) -> None:
    task = asyncio.create_task(loads.ensure(two, 10))
    await engine.loads(1)
    slot = two.slot
    assert slot is not None
    engine.tell({"phase": "ready", "held": [two.content_digest]}, {"load": "loading"})
    await asyncio.sleep(0.05)
    assert not task.done(), "the other rank still loads"
    assert slot.leases == 1, "they read it"
    engine.ready(two.content_digest)
    await task
    assert slot.leases == 0
    assert (loads.running, loads.version) == (False, 2)


async def test_what_was_loaded_last_is_not_loaded_again(
    loads: LoadScheduler, engine: Loaders, two: VersionRecord
) -> None:
    await _loaded(loads, engine, two)
    await loads.ensure(two, 0.1)
    loads.begin(two)
    assert not loads.running
    assert not loads.wants(two)
    assert len(engine.asked) == 1


async def test_a_load_of_the_same_version_is_joined(
    loads: LoadScheduler, engine: Loaders, two: VersionRecord
) -> None:
    loads.begin(two)
    tasks = [asyncio.create_task(loads.ensure(two, 10)) for _ in range(2)]
    await engine.loads(1)
    engine.ready(two.content_digest)
    await asyncio.gather(*tasks)
    assert len(engine.asked) == 1


async def test_the_load_of_another_version_is_waited_for(
    loads: LoadScheduler, engine: Loaders, two: VersionRecord, three: VersionRecord
) -> None:
    loads.begin(two)
    task = asyncio.create_task(loads.ensure(three, 10))
    await engine.loads(1)
    await asyncio.sleep(0.05)
    assert len(engine.asked) == 1, "one load at a time"
    engine.ready(two.content_digest)
    await engine.loads(2)
    assert loads.version == 3
    engine.ready(three.content_digest)
    await task


async def test_one_whose_turn_comes_after_a_failed_load_loads_all_the_same(
    loads: LoadScheduler, engine: Loaders, two: VersionRecord, three: VersionRecord
) -> None:
    loads.begin(two)
    task = asyncio.create_task(loads.ensure(three, 10))
    await engine.loads(1)
    engine.tell({"phase": "failed", "error": "no"}, {})
    await engine.loads(2)
    engine.ready(three.content_digest)
    await task


async def test_who_waits_too_long_is_told_how_far_it_is_and_the_load_goes_on(
    loads: LoadScheduler, engine: Loaders, two: VersionRecord
) -> None:
    task = asyncio.create_task(loads.ensure(two, 1.5))
    await engine.loads(1)
    engine.tell({"load": "loading", "percent": 70}, {"load": "capturing", "percent": 30})
    with pytest.raises(WeightSyncError) as caught:
        await task
    assert caught.value.reason is Reason.DEADLINE_EXCEEDED
    assert "version 2" in caught.value.message
    assert "rank 0/0/1: capturing, 30 %" in caught.value.message
    assert "prepare_timeout" in caught.value.message
    assert loads.running
    engine.ready(two.content_digest)
    await loads.ensure(two, 10)
    assert len(engine.asked) == 1


async def test_a_version_that_the_model_cannot_take_is_refused_by_names(
    loads: LoadScheduler, engine: Loaders, two: VersionRecord
) -> None:
    error = await _fail(
        loads, engine, two, error="push all of them", refused=True, names=["q"], names_total=1
    )
    assert error.reason is Reason.ENGINE_REFUSED
    assert error.message == "rank 0/0/1 refused: push all of them (q)"
    assert json.loads(error.metadata["tensors"]) == ["q"]
    await asyncio.sleep(0.1)
    loads.begin(two)
    assert not loads.running, "it would be refused again"


async def test_a_refusal_of_the_call_itself_counts_as_a_failure(
    loads: LoadScheduler, engine: Loaders, two: VersionRecord
) -> None:
    engine.refusal = {"ok": False, "error": "no process can be started"}
    with pytest.raises(WeightSyncError, match="no process can be started"):
        await loads.ensure(two, 10)
    assert not loads.up
    engine.refusal = {}
    await _loaded(loads, engine, two)


async def test_after_a_failure_another_group_of_loaders_meets_and_loads_are_put_off(
    loads: LoadScheduler,
    engine: Loaders,
    two: VersionRecord,
    three: VersionRecord,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocks = Clocks.over(monkeypatch)
    await _loaded(loads, engine, two)
    error = await _fail(loads, engine, three)
    assert error.reason is Reason.ENGINE_AWAY
    assert "status 9" in error.message
    loads.begin(three)
    assert not loads.running, "it is put off"
    clocks.let_pass(0.06)
    loads.begin(three)
    await engine.loads(3)
    engine.ready(three.content_digest)
    await loads.ensure(three, 10)
    first, second, third = (args["group"] for args in engine.asked)
    assert first == second != third


async def test_from_failure_to_failure_the_next_load_is_put_off_longer(
    loads: LoadScheduler, engine: Loaders, two: VersionRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = Clocks.over(monkeypatch)
    waits = []
    for _ in range(3):
        await _fail(loads, engine, two)
        waits.append(loads._failures.not_before - clocks.monotonic)
    assert waits == pytest.approx([0.05, 0.1, 0.2])


async def test_damage_that_is_found_after_a_load_makes_it_count_as_not_loaded(
    loads: LoadScheduler, engine: Loaders, two: VersionRecord
) -> None:
    task = asyncio.create_task(loads.ensure(two, 10))
    await engine.loads(1)
    assert two.slot is not None
    assert two.manifest is not None
    two.slot.ordered()[0].view[two.manifest.layout.shards[0].size - 1] ^= 1
    engine.ready(two.content_digest)
    with pytest.raises(WeightSyncError) as caught:
        await task
    assert caught.value.reason is Reason.DATA_CORRUPT
    assert loads.wants(two)
    assert not loads.resident(two.content_digest)


async def test_what_ranks_held_before_is_not_digested_again(
    loads: LoadScheduler, engine: Loaders, two: VersionRecord, metrics: Metrics
) -> None:
    task = asyncio.create_task(loads.ensure(two, 10))
    await engine.loads(1)
    assert two.slot is not None
    assert two.manifest is not None
    # They read none of it: what they have was proved when it was live.
    two.slot.ordered()[0].view[two.manifest.layout.shards[0].size - 1] ^= 1
    engine.ready(two.content_digest, held_before=True, load_s=0)
    await task
    value = metrics.registry.get_sample_value
    assert value("weightsync_load_seconds_count", {"model": MODEL}) == 0


async def test_resident_is_what_every_rank_has(
    loads: LoadScheduler, engine: Loaders, two: VersionRecord, three: VersionRecord
) -> None:
    assert not loads.resident(two.content_digest)
    task = asyncio.create_task(loads.ensure(three, 10))
    await engine.loads(1)
    both = [two.content_digest, three.content_digest]
    engine.tell({"phase": "ready", "held": both}, {"phase": "ready", "held": both[1:]})
    await task
    assert loads.resident(three.content_digest)
    assert not loads.resident(two.content_digest), "one rank does not have it"
    await _fail(loads, engine, two)
    assert not loads.resident(three.content_digest), "nobody knows what a loader that failed left"


async def test_status_tells_what_the_loaders_do(
    loads: LoadScheduler, engine: Loaders, two: VersionRecord, three: VersionRecord
) -> None:
    assert loads.status() == {}
    assert not loads.up
    loads.begin(two)
    await engine.loads(1)
    await until(lambda: _states(loads) == [pb.LOADER_STATE_STARTING] * 2)
    assert not loads.up
    engine.tell({"load": "loading", "percent": 40}, {"load": "starting"})
    assert _states(loads) == [pb.LOADER_STATE_PROVING, pb.LOADER_STATE_STARTING]
    assert loads.status()["0/0/0"].percent == 40
    engine.ready(two.content_digest, loader_restarts=1)
    await loads.ensure(two, 10)
    assert _states(loads) == [pb.LOADER_STATE_READY] * 2
    assert (loads.up, loads.arena_bytes) == (True, 200)
    status = loads.status()["0/0/1"]
    assert (status.version, status.arena_bytes, status.restarts) == (2, 100, 1)
    assert status.load.ToTimedelta().total_seconds() == 2.5
    task = asyncio.create_task(loads.ensure(three, 10))
    await engine.loads(2)
    engine.tell({"load": "loading", "percent": 1}, {"load": "loading", "percent": 2})
    await until(lambda: _states(loads) == [pb.LOADER_STATE_LOADING] * 2)
    assert (loads.up, loads.arena_bytes) == (True, 200), "it has its arena while it loads"
    assert loads.status()["0/0/1"].restarts == 1
    engine.tell({"phase": "failed", "error": "out of memory"})
    with pytest.raises(WeightSyncError):
        await task
    assert _states(loads) == [pb.LOADER_STATE_FAILED] * 2
    assert "out of memory" in loads.status()["0/0/0"].last_error
    assert (loads.up, loads.arena_bytes) == (False, 200)


async def test_loads_and_restarts_are_counted(
    loads: LoadScheduler,
    engine: Loaders,
    metrics: Metrics,
    two: VersionRecord,
    three: VersionRecord,
) -> None:
    def value(name: str) -> float | None:
        return metrics.registry.get_sample_value(f"weightsync_{name}", {"model": MODEL})

    for record, restarts in ((two, 1), (three, 3)):
        task = asyncio.create_task(loads.ensure(record, 10))
        await engine.loads(record.version - 1)
        engine.tell(
            {"phase": "ready", "load_s": 1.0, "loader_restarts": restarts},
            {"phase": "ready", "load_s": 4.0, "loader_restarts": 0},
        )
        await task
    assert (value("load_seconds_count"), value("load_seconds_sum")) == (2, 8)
    assert value("loader_restarts_total") == 3


async def test_close_waits_for_nothing(
    loads: LoadScheduler, engine: Loaders, two: VersionRecord
) -> None:
    loads.begin(two)
    await engine.loads(1)
    loads.close()
    await until(lambda: not loads.running)
    assert two.slot is not None
    assert two.slot.leases == 0


async def test_a_load_ends_with_the_vllm_that_it_is_made_for(
    here: World, engine: Loaders, loads: LoadScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_loads, "_LOOK_S", 0.01)
    waiting = asyncio.create_task(loads.ensure(here.model.table.get(2), 60))
    await engine.loads(1)
    engine.presence = EngineLiveness.LEFT
    with pytest.raises(WeightSyncError, match="vLLM exited during a load") as caught:
        await asyncio.wait_for(waiting, 5)
    assert caught.value.reason is Reason.ENGINE_AWAY


async def test_loaders_that_ended_for_a_sleep_have_not_failed(
    here: World, engine: Loaders, loads: LoadScheduler
) -> None:
    loads.begin(here.model.table.get(2))
    await engine.loads(1)
    engine.ready("2", "live")
    await until(lambda: not loads.running)
    assert loads.resident("live")
    waiting = asyncio.create_task(loads.ensure(here.model.table.get(3), 5))
    await engine.loads(2)
    engine.presence = EngineLiveness.ASLEEP
    engine.tell({"phase": "failed", "error": "the load was cancelled"})
    with pytest.raises(WeightSyncError, match="wake the engine up, then try again"):
        await waiting
    assert not loads.resident("live")
    assert not loads.status()
    assert loads.arena_bytes == 0
    engine.presence = EngineLiveness.HERE
    loads.begin(here.model.table.get(3))
    await engine.loads(3)
    assert engine.asked[2]["group"] != engine.asked[1]["group"], "its loaders are new ones"
    engine.ready("3", "live")
    await until(lambda: not loads.running)
    assert loads.up


async def test_a_sleep_while_a_load_is_looked_at_leaves_nothing_loaded(
    here: World, engine: Loaders, loads: LoadScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = here.model.stager.verify

    async def slept(lease: SlotLease) -> None:
        await verify(lease)
        loads.sleep()

    monkeypatch.setattr(here.model.stager, "verify", slept)
    waiting = asyncio.create_task(loads.ensure(here.model.table.get(2), 5))
    await engine.loads(1)
    engine.ready("2", "live")
    with pytest.raises(WeightSyncError, match="wake the engine up"):
        await waiting
    assert not loads.resident("live")
    assert loads.wants(here.model.table.get(2))


async def test_loaders_that_a_sleep_has_ended_unseen_start_elsewhere(
    here: World, engine: Loaders, loads: LoadScheduler
) -> None:
    engine.over = True
    waiting = asyncio.create_task(loads.ensure(here.model.table.get(2), 5))
    await engine.loads(2)
    assert engine.asked[0]["group"] != engine.asked[1]["group"]
    engine.ready("2")
    await waiting
    assert loads.up


async def test_who_wants_to_know_is_told_that_the_ranks_load(
    here: World, engine: Loaders, loads: LoadScheduler
) -> None:
    told: list[int] = []

    async def note() -> None:
        told.append(len(engine.asked))

    engine.refusal = {"ok": False, "error": "no room", "refused": True}
    with pytest.raises(WeightSyncError, match="no room"):
        await loads.ensure(here.model.table.get(2), 5, note)
    assert not told, "they refused to"
    engine.refusal = {}
    waiting = asyncio.create_task(loads.ensure(here.model.table.get(3), 5, note))
    await engine.loads(2)
    await until(lambda: told == [2])
    engine.ready("3")
    await waiting
