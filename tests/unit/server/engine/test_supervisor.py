from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.engine.plant import Engine, Plant, plant, tensors, until
from weightsync.engine import EngineState
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from pathlib import Path


def _away() -> None:
    raise WeightSyncError(Reason.ENGINE_AWAY, "nobody listens")


async def test_an_engine_that_comes_late_is_found(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "segments.sock")
    engine.before["health"] = _away
    async with plant(tmp_path, engine) as it:
        status = await it.until(pb.ENGINE_STATE_AWAY)
        await until(lambda: it.keeper.status().reason.startswith("nobody listens"))
        assert status.engine_id == ""
        status = it.keeper.status()
        assert status.reason == "nobody listens; it has not answered since this server started"
        assert not status.HasField("last_seen")
        assert it.count("weightsync_engine_up") == 0
        with pytest.raises(WeightSyncError, match="nobody listens") as caught:
            await it.apply(1)
        assert caught.value.reason is Reason.ENGINE_AWAY
        engine.before.clear()
        status = await it.ready()
        assert (status.kind, status.vllm_version) == ("memory", "none")
        assert it.count("weightsync_engine_up") == 1


async def test_an_engine_that_goes_away_and_comes_back(it: Plant) -> None:
    it.engine.before["health"] = _away
    await it.until(pb.ENGINE_STATE_AWAY)
    assert it.serving[-1] is False
    assert it.leases() == {1: 0}
    assert not [
        s.value
        for f in it.metrics.registry.collect()
        for s in f.samples
        if s.name == "weightsync_served_version"
    ]
    it.engine.before.clear()
    await it.ready()
    assert it.engine.serves == 1
    assert it.engine.events.count("resume") == 1, "it served all the time"


async def test_a_dead_engine_is_away_until_it_is_another(it: Plant) -> None:
    it.engine._condition, it.engine._reason = EngineState.DEAD, "EngineCore died"
    status = await it.until(pb.ENGINE_STATE_AWAY)
    assert re.fullmatch(r"EngineCore died; it last answered at [-0-9]+ [:0-9]+ UTC", status.reason)
    assert abs(status.last_seen.ToSeconds() - time.time()) < 60
    it.engine.restart(tensors(1))
    await it.ready()


async def test_what_is_not_supported_is_told_and_fenced(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "segments.sock")

    def refuse(info: Any) -> Any:
        object.__setattr__(info, "refusals", ("LoRA is not supported", "TP 3 neither"))
        return info

    engine.after["hello"] = refuse
    async with plant(tmp_path, engine) as it:
        await until(lambda: "fence" in engine.events)
        status = await it.until(pb.ENGINE_STATE_FENCED)
        assert status.reason == "LoRA is not supported; TP 3 neither"
        assert engine.serves == 0
        with pytest.raises(WeightSyncError, match=r"LoRA.*restart vLLM"):
            await it.apply(1)
        hellos = engine.calls.count("hello")
        await asyncio.sleep(0.2)
        assert engine.calls.count("hello") == hellos
        engine.after.clear()
        engine.restart(tensors(1))
        await it.ready()


async def test_a_fence_of_the_engines_own_is_lifted(it: Plant) -> None:
    await it.engine.fence("its lease ran out")
    await until(lambda: it.engine.serves == 1)
    await it.ready()
    assert it.engine.events.count("commit") == 0, "the ranks hold it: nothing is written"


async def test_the_fence_shows_in_the_metric_while_it_is_tried_to_lift_it(it: Plant) -> None:
    hold = asyncio.Event()
    it.engine.before["state"] = hold.wait
    it.keeper.suspect("who knows")
    await it.until(pb.ENGINE_STATE_RECONCILING)
    assert it.count("weightsync_fenced") == 1
    hold.set()
    await it.ready()
    assert it.count("weightsync_fenced") == 0


async def test_a_fault_of_ours_is_retried_and_tells_nothing(
    it: Plant, caplog: pytest.LogCaptureFixture
) -> None:
    def fault() -> None:
        it.engine.before.pop("state")
        raise RuntimeError("secret")

    it.engine.before["state"] = fault
    it.keeper.suspect("who knows")
    await until(lambda: "secret" in caplog.text)
    await it.ready()
    assert it.engine.serves == 1
    assert "secret" not in it.keeper.status().reason


async def test_a_call_that_hangs_fences_and_is_waited_for(tmp_path: Path) -> None:
    async with plant(tmp_path, commit_timeout_s=0.1) as it:
        await it.ready()
        await it.push(2)
        go = asyncio.Event()
        it.engine.before["commit"] = go.wait
        with pytest.raises(WeightSyncError, match="did not") as caught:
            await it.apply(2)
        assert caught.value.reason is Reason.ENGINE_FENCED
        assert it.engine.serves == 0
        calls = len(it.engine.calls)
        await asyncio.sleep(0.2)
        assert len(it.engine.calls) == calls, "one RPC outstanding, no other is sent"
        with pytest.raises(WeightSyncError) as caught:
            await it.apply(2)
        assert caught.value.reason is Reason.ENGINE_FENCED
        assert it.leases()[2] == 1, "the call may still read it: nothing else may be written there"
        go.set()
        await it.ready()
        assert it.leases()[2] <= (it.here.model.serving.live == 2)
        # The late commit wrote version 2; nobody had approved it, so the ranks were asked.
        assert it.engine.serves == it.here.model.serving.live
        assert it.metrics.violations()["never_mixed"] == 0


async def test_a_prepare_that_never_ends(tmp_path: Path) -> None:
    async with plant(tmp_path, prepare_timeout_s=0.2) as it:
        await it.ready()
        await it.push(2)
        quiet = it.engine._prepare
        it.engine._prepare = lambda _: {}  # type: ignore[method-assign,assignment]
        before = list(it.engine.events)
        with pytest.raises(WeightSyncError, match="did not finish") as caught:
            await it.apply(2)
        assert caught.value.reason is Reason.DEADLINE_EXCEEDED
        assert it.engine.events == before
        assert it.engine.calls[-1] == "release", "else the rank refuses the next prepare"
        assert it.leases() == {1: 1, 2: 0}
        it.engine._prepare = quiet  # type: ignore[method-assign]
        assert (await it.apply(2, prepare_timeout={"seconds": 5})).version == 2


async def test_a_prepare_that_hangs_is_no_reason_to_fence(tmp_path: Path) -> None:
    async with plant(tmp_path, prepare_timeout_s=0.2) as it:
        await it.ready()
        await it.push(2)
        go = asyncio.Event()
        it.engine.before["prepare"] = go.wait
        with pytest.raises(WeightSyncError, match="did not answer") as caught:
            await it.apply(2)
        assert caught.value.reason is Reason.DEADLINE_EXCEEDED
        # It writes nothing, however late it returns: the engine serves what it served.
        calls = len(it.engine.calls)
        with pytest.raises(WeightSyncError, match="has not returned") as caught:
            await it.apply(2)
        assert caught.value.reason is Reason.APPLY_BUSY
        assert len(it.engine.calls) == calls, "one RPC outstanding, no other is sent"
        assert it.keeper.status().state == pb.ENGINE_STATE_SERVING
        assert all(it.serving[-3:])
        assert it.count("weightsync_fenced") == 0
        assert it.leases() == {1: 1, 2: 0}
        it.engine.before.clear()
        go.set()
        await until(lambda: not it.keeper._session.ranks.hung)  # type: ignore[union-attr]
        assert (await it.apply(2, prepare_timeout={"seconds": 5})).version == 2
        assert "fence" not in it.engine.events


async def test_the_apply_that_has_the_engine_is_named(it: Plant) -> None:
    await it.push(2)
    seen: list[str] = []
    for call in ("prepare", "commit"):
        it.engine.before[call] = lambda: seen.append(it.keeper.progress.apply_id)
    report = await it.apply(2)
    assert seen == [report.apply_id] * 2
    assert it.keeper.progress.apply_id == ""
    it.engine.before["verify"] = lambda: seen.append(it.keeper.progress.apply_id)
    await it.verify()
    assert seen[2:] == [""], "a proof is no apply"


@pytest.mark.parametrize("error", [asyncio.CancelledError(), OSError(24, "Too many open files")])
async def test_who_only_asks_and_fails_says_nothing_of_the_engine(
    it: Plant, error: BaseException
) -> None:
    await it.ready()
    for only_asks in (True, False):
        it.serving.clear()
        with pytest.raises((asyncio.CancelledError, WeightSyncError)):
            async with it.keeper.exclusive(only_asks=only_asks):
                raise error
        assert it.keeper.serving is only_asks
        assert (False in it.serving) is not only_asks
    await it.ready()
    assert it.engine.serves == 1


async def test_a_lease_is_renewed_while_a_commit_takes_long(tmp_path: Path) -> None:
    async with plant(tmp_path, pause_lease_s=1.5) as it:
        await it.ready()
        await it.push(2)

        async def slow() -> None:
            await until(lambda: it.engine.calls.count("renew") >= 3)

        def once() -> None:
            it.engine.before.pop("renew")
            _away()

        it.engine.before["commit"], it.engine.before["renew"] = slow, once
        assert (await it.apply(2)).version == 2
        renewals = it.engine.calls.count("renew")
        await asyncio.sleep(0.5)
        assert it.engine.calls.count("renew") == renewals, "and no longer"


async def test_a_pause_that_hangs_is_given_up(it: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    from weightsync_server.engine import session

    monkeypatch.setattr(session, "QUICK_S", 0.1)
    await it.push(2)
    it.engine.before["pause"] = lambda: asyncio.sleep(3600)
    with pytest.raises(WeightSyncError, match=r"did not answer a pause .* apply again") as caught:
        await it.apply(2)
    assert caught.value.reason is Reason.ENGINE_AWAY
    it.engine.before.clear()
    await it.ready()
    assert it.engine.serves == 1
    assert (await it.apply(2)).version == 2


async def test_stop_leaves_the_engine_serving(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "segments.sock")
    async with plant(tmp_path, engine) as it:
        await it.ready()
    assert engine.serves == 1
    assert it.leases() == {}


async def test_a_session_that_could_not_be_made_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weightsync_server.engine import session, supervisor

    tries = 0

    def make(*args: Any, **more: Any) -> session.EngineSession:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise WeightSyncError(Reason.MEMORY_EXHAUSTED, "no memory for the status pages")
        return session.EngineSession(*args, **more)

    monkeypatch.setattr(supervisor, "EngineSession", make)
    async with plant(tmp_path) as it:
        await it.ready()
        assert tries == 3


async def test_stop_ends_also_in_the_moment_of_a_wake(tmp_path: Path) -> None:
    for _ in range(5):
        async with plant(tmp_path) as it:
            await it.ready()
            await asyncio.sleep(0.01)
            # It waits for its next look; the event and the cancellation come together.
            it.keeper._wake.set()
            async with asyncio.timeout(5):
                await it.keeper.stop()


async def test_ranks_of_other_nodes_unmap_after_each_apply(
    it: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their copies are no segments of this host, so that none of these is retired."""
    session = it.keeper._session
    assert session is not None
    await until(lambda: session.tidy)
    unmap, asked = session.unmap, []

    async def noted(existing: frozenset[str], prefetched: str = "") -> frozenset[str] | None:
        asked.append(existing)
        return await unmap(existing, prefetched)

    monkeypatch.setattr(session, "unmap", noted)
    for version in (2, 3):
        await it.push(version)
        await it.apply(version)
    await asyncio.sleep(0.2)
    assert not asked, "one host alone has nothing to unmap"
    object.__setattr__(session.info, "nodes", 2)
    for version in (4, 5):
        asked.clear()
        await it.push(version)
        await it.apply(version)
        await until(lambda: bool(asked))
