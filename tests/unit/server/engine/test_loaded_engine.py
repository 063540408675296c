"""A server and an engine whose versions are loaded beside generation."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.unit.server.engine.loading_engine import LoadingEngine
from tests.unit.server.engine.plant import plant, until
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.version_events import VersionChanged
from weightsync_server.engine import supervisor

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def engine(tmp_path: Path) -> LoadingEngine:
    return LoadingEngine(tmp_path / "segments.sock")


async def test_a_proof_at_the_start_that_fails_goes_on_to_loads(
    tmp_path: Path, engine: LoadingEngine
) -> None:
    async with plant(tmp_path, engine) as it:
        (rank,) = (await it.ready()).ranks
        assert engine.serves == it.here.model.serving.live == 1
        assert "commit" not in engine.events, "its own checkpoint is live: nothing is written"
        assert rank.transform == pb.TRANSFORM_TWIN
        assert rank.transform_reason == "vLLM computes these from the weights: b"
        assert rank.loader.state == pb.LOADER_STATE_READY
        assert (rank.loader.version, rank.loader.arena_bytes) == (1, 64)
        assert engine.loaded == [rank.content_digest]
        assert it.keeper.loads is not None
        assert it.keeper.loads.up
        assert it.count("weightsync_load_seconds_count") == 1


async def test_a_capture_that_finds_no_plan_goes_on_to_loads(tmp_path: Path) -> None:
    engine = LoadingEngine(tmp_path / "segments.sock", why="experts are repacked")
    # It is served all the same: nothing is to be done about it.
    engine.remedy = "serve the model on a GPU"
    async with plant(tmp_path, engine) as it:
        (rank,) = (await it.ready()).ranks
        assert engine.calls.count("capture") == 1
        assert rank.transform == pb.TRANSFORM_TWIN
        assert rank.transform_reason == "experts are repacked"
        assert len(engine.loaded) == 1


async def test_a_cache_is_not_kept_that_a_version_reads_by_other_scales(
    tmp_path: Path, engine: LoadingEngine
) -> None:
    keep = {"cache": pb.CACHE_MODE_KEEP}
    between = {"mode": pb.PAUSE_MODE_BETWEEN_STEPS}
    async with plant(tmp_path, engine) as it:
        await it.ready()
        await it.push(2)
        engine.rescaled = True
        for pause in (keep, between):
            with pytest.raises(WeightSyncError, match=r"use pause\.cache RECOMPUTE") as caught:
                await it.apply(2, pause=pause)
            assert caught.value.reason is Reason.ENGINE_UNSUPPORTED
        assert engine.serves == 1
        assert "commit" not in engine.events
        assert (await it.apply(2)).version == 2
        assert engine.serves == 2
        engine.rescaled = False
        await it.push(3)
        assert (await it.apply(3, pause=keep)).version == 3


async def test_an_engine_without_loaders_is_refused_as_before(tmp_path: Path) -> None:
    engine = LoadingEngine(tmp_path / "segments.sock", able=False)
    async with plant(tmp_path, engine) as it:
        status = await it.until(pb.ENGINE_STATE_FENCED)
        assert "not plain copies of its checkpoint (b)" in status.reason
        assert "load" not in engine.calls


async def test_a_second_load_that_is_not_what_is_live_is_refused(
    tmp_path: Path, engine: LoadingEngine
) -> None:
    engine.wrong_load = True
    async with plant(tmp_path, engine) as it:
        status = await it.until(pb.ENGINE_STATE_FENCED)
        await until(lambda: "fence" in engine.events)
        assert "not what a second load makes of its checkpoint (b)" in status.reason
        assert engine.serves == 0
        assert "commit" not in engine.events


async def test_an_apply_takes_what_was_loaded_and_tells_so(
    tmp_path: Path, engine: LoadingEngine
) -> None:
    async with plant(tmp_path, engine) as it:
        await it.ready()
        await it.push(2)
        planned = await it.apply(2, dry_run=True)
        assert planned.plan.strategy == pb.APPLY_STRATEGY_TWIN
        assert [rank.transform for rank in planned.ranks] == [pb.TRANSFORM_TWIN]
        report = await it.apply(2)
        assert report.strategy == pb.APPLY_STRATEGY_TWIN
        assert [rank.transform for rank in report.ranks] == [pb.TRANSFORM_TWIN]
        assert engine.serves == 2
        assert (await it.apply(2)).ranks[0].transform == pb.TRANSFORM_TWIN
        assert (await it.rollback()).report.strategy == pb.APPLY_STRATEGY_TWIN
        assert engine.serves == 1


async def test_an_apply_of_copies_tells_that_it_is_one(tmp_path: Path) -> None:
    async with plant(tmp_path) as it:
        await it.ready()
        await it.push(2)
        assert [rank.transform for rank in (await it.apply(2, dry_run=True)).ranks] == [
            pb.TRANSFORM_PLAN
        ]
        assert [rank.transform for rank in (await it.apply(2)).ranks] == [pb.TRANSFORM_PLAN]
        assert it.keeper.loads is None


async def test_an_apply_that_does_not_wait_for_its_load_changes_nothing(
    tmp_path: Path, engine: LoadingEngine
) -> None:
    async with plant(tmp_path, engine) as it:
        await it.ready()
        engine.go.clear()
        await it.push(2)
        with pytest.raises(WeightSyncError, match="still being loaded") as caught:
            await it.apply(2, prepare_timeout={"nanos": 300_000_000})
        assert caught.value.reason is Reason.DEADLINE_EXCEEDED
        assert engine.serves == 1
        engine.go.set()
        assert (await it.apply(2)).version == 2
        assert len(engine.loaded) == 2, "the load went on"


async def test_a_version_that_is_not_loaded_is_compared_with_nothing(
    tmp_path: Path, engine: LoadingEngine
) -> None:
    async with plant(tmp_path, engine) as it:
        await it.bring(2)
        assert (await it.verify()).verified
        assert not (await it.verify(1)).verified, "it lies beside what is live"
        engine.go.clear()
        await it.push(3)
        loaded = list(engine.loaded)
        with pytest.raises(WeightSyncError, match="version 3 is not loaded beside") as caught:
            await it.verify(3)
        assert caught.value.reason is Reason.ENGINE_REFUSED
        assert engine.loaded == loaded
        assert engine.serves == 2


async def test_a_load_that_fails_leaves_the_engine_as_it_is(
    tmp_path: Path, engine: LoadingEngine
) -> None:
    async with plant(tmp_path, engine) as it:
        await it.ready()
        engine.broken = "it ran out of memory"
        await it.push(2)
        for _ in range(2):
            with pytest.raises(WeightSyncError, match="it ran out of memory; try again") as caught:
                await it.apply(2)
            assert caught.value.reason is Reason.ENGINE_AWAY
            assert it.keeper.status().state == pb.ENGINE_STATE_SERVING, "the ranks have told why"
        engine.broken = ""
        assert (await it.apply(2)).version == 2


async def test_a_commit_does_not_wait_for_the_next_look_at_the_engine(
    tmp_path: Path, engine: LoadingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with plant(tmp_path, engine) as it:
        await it.ready()
        monkeypatch.setattr(supervisor, "_HEALTH_S", 3600.0)
        # The look that is under way is the last one that comes by itself.
        await asyncio.sleep(0.1)
        await it.push(2)
        await until(lambda: len(engine.loaded) == 2, 5)
        assert engine.loaded[1] == it.here.model.table.get(2).content_digest
        assert engine.serves == 1, "it was loaded, not applied"


async def test_a_commit_wakes_nobody_where_versions_are_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with plant(tmp_path) as it:
        await it.ready()
        monkeypatch.setattr(supervisor, "_HEALTH_S", 3600.0)
        await asyncio.sleep(0.1)
        await it.push(2)
        assert not it.keeper._wake.is_set()


async def test_a_server_that_starts_beside_such_an_engine_goes_on_with_loads(
    tmp_path: Path, engine: LoadingEngine
) -> None:
    async with plant(tmp_path, engine, durable=True) as it:
        await it.bring(2)
    before = engine.events.count("pause")
    async with plant(tmp_path, engine, durable=True) as it:
        (rank,) = (await it.ready()).ranks
        assert it.here.model.serving.live == engine.serves == 2
        assert engine.events.count("pause") == before
        assert (rank.transform, rank.transform_reason) == (pb.TRANSFORM_TWIN, "")


async def test_a_server_that_stopped_hears_of_no_version(
    tmp_path: Path, engine: LoadingEngine
) -> None:
    async with plant(tmp_path, engine) as it:
        await it.ready()
        observers = it.here.model.events._handlers[VersionChanged]
        count = len(observers)
        await it.keeper.stop()
        assert len(observers) == count - 1


async def test_an_engine_generates_while_its_checkpoint_is_loaded(
    tmp_path: Path, engine: LoadingEngine
) -> None:
    engine.go.clear()
    async with plant(tmp_path, engine) as it:
        status = await it.until(pb.ENGINE_STATE_PROVING)
        assert engine.serves == 1
        assert not it.keeper.serving, "it is not proved"
        assert it.here.model.serving.live == 0
        await until(lambda: bool(it.keeper.status().ranks))
        (rank,) = it.keeper.status().ranks
        assert rank.loader.state == pb.LOADER_STATE_STARTING
        assert (rank.version, rank.transform) == (0, pb.TRANSFORM_TWIN)
        assert "second load" in status.reason
        await it.push(2)
        with pytest.raises(WeightSyncError, match="still being loaded") as caught:
            await it.apply(2, prepare_timeout={"nanos": 200_000_000})
        assert caught.value.reason is Reason.DEADLINE_EXCEEDED
        waiting = asyncio.create_task(it.apply(2))
        await asyncio.sleep(0.05)
        assert "commit" not in engine.events
        engine.go.set()
        assert (await waiting).previous_version == 1
        assert engine.serves == 2


async def test_what_is_served_before_a_proof_that_fails_is_served_no_more(
    tmp_path: Path, engine: LoadingEngine
) -> None:
    engine.go.clear()
    engine.wrong_load = True
    async with plant(tmp_path, engine) as it:
        await it.until(pb.ENGINE_STATE_PROVING)
        assert engine.serves == 1
        engine.go.set()
        await it.until(pb.ENGINE_STATE_FENCED)
        await until(lambda: engine.serves == 0)
        assert "commit" not in engine.events


async def test_a_server_that_starts_in_the_middle_of_a_proof_goes_on_with_it(
    tmp_path: Path, engine: LoadingEngine
) -> None:
    engine.go.clear()
    async with plant(tmp_path, engine, durable=True) as it:
        await it.until(pb.ENGINE_STATE_PROVING)
    assert engine.serves == 1
    async with plant(tmp_path, engine, durable=True) as it:
        await it.until(pb.ENGINE_STATE_PROVING)
        assert engine.serves == 1
        engine.go.set()
        await it.ready()
        assert it.here.model.serving.live == engine.serves == 1


async def test_an_engine_that_lost_the_live_version_serves_nothing_before_it_has_it(
    tmp_path: Path, engine: LoadingEngine
) -> None:
    async with plant(tmp_path, engine, durable=True) as it:
        await it.bring(2)
    again = LoadingEngine(tmp_path / "segments.sock")
    again.go.clear()
    async with plant(tmp_path, again, durable=True) as it:
        await until(lambda: "load" in again.calls or bool(again._jobs))
        await asyncio.sleep(0.1)
        assert again.serves == 0
        again.go.set()
        await it.ready()
        assert again.serves == 2


async def test_only_an_apply_waits_for_a_proof(tmp_path: Path, engine: LoadingEngine) -> None:
    engine.go.clear()
    async with plant(tmp_path, engine) as it:
        await it.until(pb.ENGINE_STATE_PROVING)
        for call in (it.verify(), it.rollback()):
            with pytest.raises(WeightSyncError, match="compared with a second load") as caught:
                await asyncio.wait_for(call, 1)
            assert caught.value.reason is Reason.ENGINE_AWAY


async def test_a_server_that_stops_in_a_proof_keeps_nobody_waiting(
    tmp_path: Path, engine: LoadingEngine
) -> None:
    engine.go.clear()
    async with plant(tmp_path, engine) as it:
        await it.until(pb.ENGINE_STATE_PROVING)
        await it.push(2)
        waiting = asyncio.create_task(it.apply(2))
        await asyncio.sleep(0.05)
        await asyncio.wait_for(it.keeper.stop(), 5)
        with pytest.raises(WeightSyncError, match="the server stops"):
            await asyncio.wait_for(waiting, 5)


async def test_a_proof_that_fails_for_now_is_begun_again_a_few_times(
    tmp_path: Path, engine: LoadingEngine
) -> None:
    engine.broken = "it ran out of memory"
    async with plant(tmp_path, engine) as it:
        await until(lambda: engine.calls.count("load") >= 2)
        assert "fence" not in engine.events
        assert engine.serves == 1
        # It is not served for ever what nobody can prove.
        await until(lambda: "fence" in engine.events)
        assert engine.serves == 0
        engine.broken = ""
        await it.ready()
        assert engine.serves == 1


async def test_what_was_refused_is_not_served_by_the_next_server(
    tmp_path: Path, engine: LoadingEngine
) -> None:
    engine.wrong_load = True
    async with plant(tmp_path, engine, durable=True) as it:
        await it.until(pb.ENGINE_STATE_FENCED)
        await until(lambda: engine.serves == 0)
    resumed = engine.events.count("resume")
    async with plant(tmp_path, engine, durable=True) as it:
        await it.until(pb.ENGINE_STATE_FENCED)
        await until(lambda: it.keeper.status().reason.startswith("the engine's live"))
        assert engine.events.count("resume") == resumed
        assert engine.serves == 0
