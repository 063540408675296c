"""Applies that write only what changes, and the comparison of everything after them."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.engine.plant import KINDS, Engine, Plant, plant, tensors, until
from tests.unit.server.world import make_shard
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.engine import live_check

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

#: Bytes of what `_push_part` changes.
_PART = 65


class SlowEngine(Engine):
    """Compares when it is told to, unless it was asked for something else meanwhile.

    Attributes:
        go: Set: comparisons come to an end.
    """

    def __init__(self, socket: Path) -> None:
        super().__init__(socket)
        self.go = threading.Event()
        self.jobs = 0
        self._over = False
        self._threads: list[threading.Thread] = []
        # A job that was given up writes no page after the next one's; nor is one begun unseen.
        self._one = threading.Lock()

    def _prepare(self, args: Any) -> dict[str, Any]:
        with self._one:
            self.jobs += 1
            return super()._prepare(args)

    def _verify(self, args: Any) -> dict[str, Any]:
        with self._one:
            self.jobs += 1
            if not self._over:
                thread = threading.Thread(target=self._work, args=(args, self.jobs))
                thread.start()
                self._threads.append(thread)
        return {}

    def _work(self, args: Any, mine: int) -> None:
        self.go.wait(20)
        with self._one:
            if self.go.is_set() and self.jobs == mine:
                super()._verify(args)

    def end(self) -> None:
        """Begin no other comparison, and return when none is under way."""
        with self._one:
            self._over = True
        self.go.set()
        for thread in self._threads:
            thread.join()


@pytest.fixture
async def slow(tmp_path: Path) -> AsyncIterator[Plant]:
    engine = SlowEngine(tmp_path / "segments.sock")
    async with plant(tmp_path, engine) as made:
        await made.ready()
        yield made
        await asyncio.to_thread(engine.end)


def _part(seed: int) -> dict[str, bytes]:
    """Return version 1 with its two small tensors those of version `seed`."""
    return tensors(seed) | {"a": tensors(1)["a"]}


async def _push_part(it: Plant, version: int, seed: int | None = None) -> None:
    data = _part(version if seed is None else seed)
    await it.here.push(
        [make_shard(0, [(name, *KINDS[name], part) for name, part in data.items()])], version
    )


def _info(it: Plant, version: int) -> pb.VersionInfo:
    return it.here.model.table.get(version).to_info()


def _checks(it: Plant) -> dict[str, float]:
    name = "weightsync_live_checks_total"
    return {o: it.count(name, outcome=o) for o in ("passed", "failed", "cancelled")}


async def _passed(it: Plant, version: int) -> None:
    await until(lambda: _info(it, version).live_check == pb.LIVE_CHECK_PASSED)


async def test_what_changed_is_written_and_everything_compared_after_it(it: Plant) -> None:
    assert _info(it, 1).live_check == pb.LIVE_CHECK_PASSED, "the adoption compared everything"
    adopted = it.count("weightsync_live_check_timestamp_seconds")
    await _push_part(it, 2)
    report = await it.apply(2)
    assert (report.strategy, report.written_bytes) == (pb.APPLY_STRATEGY_PATCH, _PART)
    assert it.engine.live == _part(2)
    await _passed(it, 2)
    info = _info(it, 2)
    assert abs(info.live_check_time.ToNanoseconds() / 1e9 - time.time()) < 10
    assert it.count("weightsync_live_check_timestamp_seconds") > adopted
    assert _checks(it) == {"passed": 1, "failed": 0, "cancelled": 0}
    assert _info(it, 1).live_check == pb.LIVE_CHECK_UNSPECIFIED, "it is not live any more"


async def test_a_copy_of_everything_was_compared_in_its_pause(it: Plant) -> None:
    await it.push(2)
    report = await it.apply(2)
    assert report.strategy == pb.APPLY_STRATEGY_COPY
    assert _info(it, 2).live_check == pb.LIVE_CHECK_PASSED
    assert _checks(it) == {"passed": 0, "failed": 0, "cancelled": 0}


async def test_a_version_is_compared_when_every_engine_that_serves_it_was(it: Plant) -> None:
    serving, own = it.here.model.serving, it.keeper.served
    first = _info(it, 1).live_check_time.ToNanoseconds()
    other = serving.engine("other")
    other.set_live(1)
    assert _info(it, 1).live_check == pb.LIVE_CHECK_PENDING
    other.set_live_check(1, pb.LIVE_CHECK_FAILED)
    own.set_live_check(1, pb.LIVE_CHECK_PASSED)
    assert _info(it, 1).live_check == pb.LIVE_CHECK_FAILED, "that of another engine hides nothing"
    other.set_live_check(1, pb.LIVE_CHECK_PASSED)
    assert _info(it, 1).live_check == pb.LIVE_CHECK_PASSED
    assert _info(it, 1).live_check_time.ToNanoseconds() > first
    other.set_live_check(1, pb.LIVE_CHECK_PENDING)
    assert not _info(it, 1).HasField("live_check_time")
    serving.forget("other")
    assert _info(it, 1).live_check == pb.LIVE_CHECK_PASSED


class StagingEngine(Engine):
    """Compares a commit with what it has staged itself, and tells what it has on its device."""

    def _ready(self, *args: Any) -> dict[str, Any]:
        told = {"device_room": 900, "device_used": 700, "h2d_bytes": 40}
        return super()._ready(*args) | told

    def _commit(self, args: Any) -> dict[str, Any]:
        told = {"device_room": 900, "device_used": 700, "h2d_bytes": 2, "compared_all": False}
        return super()._commit(args) | told


async def test_after_a_commit_of_what_was_staged_everything_is_compared(tmp_path: Path) -> None:
    async with plant(tmp_path, StagingEngine(tmp_path / "segments.sock")) as staging:
        await staging.ready()
        await staging.push(2)
        report = await staging.apply(2)
        assert report.strategy == pb.APPLY_STRATEGY_COPY
        (rank,) = report.ranks
        told = (rank.device_room_bytes, rank.device_used_bytes, rank.h2d_bytes)
        assert told == (900, 700, 42)
        await _passed(staging, 2)
        assert _checks(staging) == {"passed": 1, "failed": 0, "cancelled": 0}
        (held,) = staging.keeper.status().ranks
        assert (held.device_room_bytes, held.device_used_bytes) == (900, 700)


async def test_a_rollback_writes_what_changed_too(it: Plant) -> None:
    await _push_part(it, 2)
    await it.apply(2)
    report = (await it.rollback()).report
    assert (report.strategy, report.written_bytes) == (pb.APPLY_STRATEGY_PATCH, _PART)
    assert it.engine.serves == 1
    await _passed(it, 1)


async def test_a_bit_that_nobody_wrote_is_found_and_the_version_placed_again(it: Plant) -> None:
    await _push_part(it, 2)
    it.engine.live["a"] = b"\0" * 256
    report = await it.apply(2)
    assert report.strategy == pb.APPLY_STRATEGY_PATCH, "the pause compares what it wrote"
    await until(lambda: _checks(it)["failed"] == 1)
    await until(lambda: it.engine.live == _part(2))
    await it.ready()
    assert it.metrics.violations()["never_mixed"] == 1
    assert _info(it, 2).live_check == pb.LIVE_CHECK_PASSED
    assert it.engine.events[-3:] == ["pause", "commit", "resume"]


async def test_while_it_compares_the_version_tells_so(slow: Plant) -> None:
    await _push_part(slow, 2)
    await slow.apply(2)
    await until(lambda: slow.keeper.checks.running)
    info = _info(slow, 2)
    assert info.live_check == pb.LIVE_CHECK_PENDING
    assert not info.HasField("live_check_time")
    assert slow.engine.calls[-1] == "verify"
    slow.engine.go.set()  # type: ignore[attr-defined]
    await _passed(slow, 2)


async def test_what_comes_meanwhile_ends_a_comparison_which_is_begun_again(slow: Plant) -> None:
    await _push_part(slow, 2)
    await _push_part(slow, 3)
    await slow.apply(2)
    await until(lambda: slow.keeper.checks.running)
    await slow.apply(3)
    assert _checks(slow)["cancelled"] == 1
    await until(lambda: slow.keeper.checks.running)
    # Also by what does not become live.
    with pytest.raises(WeightSyncError):
        await slow.apply(9)
    assert _checks(slow)["cancelled"] == 2
    assert _info(slow, 3).live_check == pb.LIVE_CHECK_PENDING
    slow.engine.go.set()  # type: ignore[attr-defined]
    await _passed(slow, 3)
    assert _checks(slow) == {"passed": 1, "failed": 0, "cancelled": 2}


async def test_one_that_had_begun_does_not_settle_what_is_owed_since(slow: Plant) -> None:
    """Whoever wrote meanwhile may have written where it had looked by then."""
    checks, engine = slow.keeper.checks, slow.engine
    await _push_part(slow, 2)
    await slow.apply(2)
    await until(lambda: checks.running)
    pending = checks._pending
    assert pending is not None
    checks.owe(pending[0])
    engine.go.set()  # type: ignore[attr-defined]
    await _passed(slow, 2)
    # As it was compared once more.
    assert _checks(slow) == {"passed": 2, "failed": 0, "cancelled": 0}


async def test_a_comparison_that_is_overdue_is_waited_for(
    slow: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_check, "_PATIENCE_S", 0.2)
    await _push_part(slow, 2)
    await _push_part(slow, 3)
    await slow.apply(2)
    await until(lambda: slow.keeper.checks.running)
    await slow.apply(3)
    # The time counts from the first write that was not compared as a whole.
    await until(lambda: slow.keeper.checks.running)
    await asyncio.sleep(0.25)
    applying = asyncio.create_task(slow.rollback())
    await asyncio.sleep(0.1)
    assert not applying.done()
    assert slow.engine.calls[-1] == "verify"
    slow.engine.go.set()  # type: ignore[attr-defined]
    assert (await applying).report.strategy == pb.APPLY_STRATEGY_PATCH
    assert _checks(slow)["cancelled"] == 1
    await until(lambda: _checks(slow)["passed"] == 2)


async def test_a_comparison_that_never_ends_is_not_waited_for_long(
    slow: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_check, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(live_check, "_WAIT_S", 0.1)
    await _push_part(slow, 2)
    await _push_part(slow, 3)
    await slow.apply(2)
    await until(lambda: slow.keeper.checks.running)
    assert (await slow.apply(3)).version == 3
    assert _checks(slow)["cancelled"] == 1


async def test_without_a_result_it_is_tried_again(
    it: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_check, "_AGAIN_S", 0.1)
    await _push_part(it, 2)
    it.engine.after["verify"] = lambda replies: [{**replies[0], "ok": False, "error": "busy"}]
    await it.apply(2)
    await until(lambda: _checks(it)["cancelled"] >= 2)
    assert _info(it, 2).live_check == pb.LIVE_CHECK_PENDING
    assert it.keeper.serving
    it.engine.after.clear()
    await _passed(it, 2)


async def test_an_engine_that_sleeps_is_compared_when_it_is_awake(slow: Plant) -> None:
    await _push_part(slow, 2)
    await slow.apply(2)
    await until(lambda: slow.keeper.checks.running)
    slow.engine.sleeping = True
    await asyncio.sleep(0.1)
    slow.keeper.checks.stop()
    verified = slow.engine.calls.count("verify")
    await asyncio.sleep(0.1)
    assert slow.engine.calls.count("verify") == verified
    slow.engine.sleeping = False
    slow.engine.go.set()  # type: ignore[attr-defined]
    await _passed(slow, 2)


async def test_an_engine_that_goes_away_takes_its_comparison_with_it(slow: Plant) -> None:
    await _push_part(slow, 2)
    await slow.apply(2)
    await until(lambda: slow.keeper.checks.running)
    slow.engine.restart(tensors(1))
    await until(lambda: slow.engine.live == _part(2))
    await slow.ready()
    assert _info(slow, 2).live_check == pb.LIVE_CHECK_PASSED, "the reconciliation compared it"
    assert not slow.keeper.checks.running


async def test_a_version_that_is_restored_was_compared_as_a_whole(slow: Plant) -> None:
    await _push_part(slow, 2)
    await slow.apply(2)
    await _push_part(slow, 3)
    lies = [{"content_digest": "0" * 32}, {}]
    slow.engine.after["commit"] = lambda replies: [replies[0] | lies.pop(0)]
    with pytest.raises(WeightSyncError) as caught:
        await slow.apply(3)
    assert caught.value.reason is Reason.APPLY_RESTORED
    assert slow.engine.live == _part(2)
    assert _info(slow, 2).live_check == pb.LIVE_CHECK_PASSED


async def test_a_version_that_is_put_back_from_where_it_lay_is_compared_again(slow: Plant) -> None:
    await _push_part(slow, 2)
    await slow.apply(2)
    await _push_part(slow, 3)
    lies: list[dict[str, object]] = [{"content_digest": "0" * 32}, {"compared_all": False}]
    slow.engine.after["commit"] = lambda replies: [replies[0] | lies.pop(0)]
    with pytest.raises(WeightSyncError):
        await slow.apply(3)
    assert slow.engine.live == _part(2)
    await until(lambda: slow.keeper.checks.running)
    assert _info(slow, 2).live_check == pb.LIVE_CHECK_PENDING


async def test_a_verification_by_hand_settles_what_is_owed(slow: Plant) -> None:
    await _push_part(slow, 2)
    await slow.apply(2)
    await until(lambda: slow.keeper.checks.running)
    verifying = asyncio.create_task(slow.verify())
    await until(lambda: _checks(slow)["cancelled"] == 1)
    slow.engine.go.set()  # type: ignore[attr-defined]
    assert (await verifying).verified
    assert _info(slow, 2).live_check == pb.LIVE_CHECK_PASSED
    assert _checks(slow) == {"passed": 0, "failed": 0, "cancelled": 1}


async def test_a_dry_run_tells_the_strategy_and_predicts_by_what_it_took(it: Plant) -> None:
    await _push_part(it, 2)
    plan = (await it.apply(2, dry_run=True)).plan
    assert (plan.strategy, plan.bytes) == (pb.APPLY_STRATEGY_PATCH, _PART)
    assert not plan.HasField("predicted_pause"), "nothing was patched yet"
    patched = await it.apply(2)
    await _push_part(it, 3)
    plan = (await it.apply(3, dry_run=True)).plan
    paused = patched.phases.paused_total.ToNanoseconds()
    assert plan.predicted_pause.ToNanoseconds() == pytest.approx(paused, rel=0.01)
    await it.push(4)
    plan = (await it.apply(4, dry_run=True)).plan
    assert (plan.strategy, plan.bytes) == (pb.APPLY_STRATEGY_COPY, 321)
    assert not plan.HasField("predicted_pause"), "a patch tells nothing about a copy"


async def test_as_long_as_a_process_has_the_memory_it_is_compared_again_and_again(
    it: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the word of the ranks, whatever became of who has handed it out."""
    monkeypatch.setattr(live_check, "CHECK_S", 0.01)
    await _push_part(it, 2)
    await it.apply(2)
    await _passed(it, 2)
    checks = it.keeper.checks
    checks.watched = True
    checks._watch_at = 0.0
    before = _checks(it)["passed"]
    holders = [1]
    monkeypatch.setattr(it.engine, "_writers", lambda: {"holders": holders})
    await until(lambda: _checks(it)["passed"] >= before + 3, 20)
    holders.clear()
    await until(lambda: not checks.watched, 20)


async def test_of_ranks_of_older_releases_it_ends_with_those_that_are_attached(
    it: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They remember nobody, and say so by no word of it."""
    monkeypatch.setattr(live_check, "CHECK_S", 0.01)
    tell = it.engine._tell

    def tell_less(page: str, report: Any) -> None:
        tell(page, {name: value for name, value in report.items() if name != "holders"})

    monkeypatch.setattr(it.engine, "_tell", tell_less)
    checks = it.keeper.checks
    checks.writers["a trainer"] = ""
    # Its memory is compared also after a reconciliation, which asks who has it.
    it.keeper.suspect("who knows")
    await it.until(pb.ENGINE_STATE_FENCED)
    await it.ready()
    assert checks.watched
    before = _checks(it)["passed"]
    await until(lambda: _checks(it)["passed"] >= before + 2, 20)
    assert checks.watched
    checks.writers.clear()
    await until(lambda: not checks.watched, 20)


async def test_a_rank_that_fails_to_compare_does_not_say_that_nobody_has_its_memory(
    it: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What this server has given nobody, one before it may have."""
    monkeypatch.setattr(live_check, "CHECK_S", 0.01)
    holders = [1]
    monkeypatch.setattr(it.engine, "_writers", lambda: {"holders": holders})
    it.keeper.suspect("the server was started anew")
    await it.until(pb.ENGINE_STATE_FENCED)
    await it.ready()
    checks = it.keeper.checks
    assert checks.watched
    tell = it.engine._tell

    def fail(page: str, report: Any) -> None:
        tell(page, {"ticket": report["ticket"], "phase": "failed", "error": "out of memory"})

    monkeypatch.setattr(it.engine, "_tell", fail)
    monkeypatch.setattr(live_check, "CHECK_S", 60.0)
    assert not (await it.verify()).verified
    assert checks.watched
    monkeypatch.setattr(it.engine, "_tell", tell)
    holders.clear()
    await until(lambda: not checks.watched, 20)


async def test_a_rank_that_says_late_who_has_its_memory_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tmp_path / "segments.sock", ranks=2)
    monkeypatch.setattr(engine.ranks[1], "_writers", lambda: {"holders": [1]})
    silent = {"ok": False, "error": "out of memory"}
    async with plant(tmp_path, engine) as it:
        await it.bring(2)
        it.keeper.checks.watched = False
        asked: list[Any] = []

        def late(replies: Any) -> Any:
            asked.append(replies)
            return replies if len(asked) > 1 else [replies[0], silent]

        engine.after["state"] = late
        it.keeper.suspect("the server was started anew")
        await until(lambda: len(asked) > 1)
        await it.ready()
        assert it.keeper.checks.watched
