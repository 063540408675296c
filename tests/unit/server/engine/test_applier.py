from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf import duration_pb2

from tests.unit.server.engine.plant import Plant, checkpoint, shards, tensors, until
from tests.unit.server.world import make_shard
from weightsync.errors import Reason, WeightSyncError
from weightsync.testing import MemoryEngine
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable


def _away(text: str = "it went away") -> Callable[[], None]:
    def fail() -> None:
        raise WeightSyncError(Reason.ENGINE_AWAY, text)

    return fail


async def _refused(it: Plant, reason: Reason, *part: str, **fields: Any) -> WeightSyncError:
    with pytest.raises(WeightSyncError) as caught:
        await it.apply(**fields)
    assert caught.value.reason is reason, caught.value.message
    for text in part:
        assert text in caught.value.message
    return caught.value


async def test_a_version_is_made_live(it: Plant) -> None:
    await it.push(2)
    report = await it.apply(2)
    assert report.outcome == pb.APPLY_OUTCOME_APPLIED
    assert (report.version, report.previous_version) == (2, 1)
    assert report.content_digest == it.here.model.table.get(2).content_digest
    assert [rank.content_digest for rank in report.ranks] == [report.content_digest]
    assert report.written_bytes == sum(map(len, tensors(2).values()))
    assert it.engine.serves == it.engine.version == it.here.model.serving.live == 2
    assert it.engine.events[-3:] == ["pause", "commit", "resume"]
    assert it.journal.live == (2, 1)
    assert it.outcomes() == {"applied": 1}
    assert it.count("weightsync_served_version", rank="0/0/0") == 2
    assert it.leases() == {1: 0, 2: 1}
    assert all(it.serving[-3:])


async def test_zero_is_the_newest_that_is_good(it: Plant) -> None:
    await it.push(2, 3)
    await it.here.model.serving.reject(3, "no good")
    assert (await it.apply(0)).version == 2
    assert (await it.apply(0)).outcome == pb.APPLY_OUTCOME_ALREADY_LIVE


async def test_the_live_version_again_touches_nothing(it: Plant) -> None:
    before = list(it.engine.events)
    report = await it.apply(1)
    assert report.outcome == pb.APPLY_OUTCOME_ALREADY_LIVE
    assert [(rank.rank, rank.version) for rank in report.ranks] == [("0/0/0", 1)]
    assert it.engine.events == before


async def test_a_dry_run_changes_nothing(it: Plant) -> None:
    await it.push(2)
    before = list(it.engine.events)
    report = await it.apply(2, dry_run=True)
    assert report.outcome == pb.APPLY_OUTCOME_PLANNED
    assert report.plan.bytes == sum(map(len, tensors(2).values()))
    assert not report.plan.read_from_store
    assert it.engine.events == before
    assert it.engine.serves == it.here.model.serving.live == 1
    assert it.journal.live[0] == 1
    assert it.leases() == {1: 1, 2: 0}
    assert it.outcomes() == {"planned": 1}
    assert it.engine.calls[-1] == "release"


async def test_a_dry_run_clears_no_rejection(it: Plant) -> None:
    await it.push(2)
    await it.here.model.serving.reject(2, "bad")
    await it.apply(2, dry_run=True, clear_rejected=True)
    assert it.here.model.table.get(2).rejected_reason == "bad"


async def test_a_version_that_does_not_exist(it: Plant) -> None:
    await _refused(it, Reason.VERSION_UNKNOWN, "no version 9", version=9)
    assert it.outcomes() == {"refused": 1}


async def test_a_push_that_is_not_committed(it: Plant) -> None:
    shard = shards(2)[0]
    begun = await it.here.pushes.begin(
        pb.BeginPushRequest(model="m", version=2, shard_count=1), None
    )
    await it.here.join(begun.push_id, [*shard.layout(), *shard.chunks(100)[:1]])
    await _refused(it, Reason.PUSH_INCOMPLETE, "version 2", "shard 0", version=2)
    assert it.engine.serves == 1


async def test_below_the_live_version_is_rollbacks_business(it: Plant) -> None:
    await it.push(2)
    await it.apply(2)
    await _refused(it, Reason.VERSION_BELOW_LIVE, "Rollback", "version 1", version=1)
    assert it.engine.serves == 2


async def test_a_rejected_version_needs_a_word(it: Plant) -> None:
    await it.push(2)
    await it.here.model.serving.reject(2, "it babbles")
    await _refused(it, Reason.VERSION_REJECTED, "it babbles", "clear_rejected", version=2)
    assert (await it.apply(2, clear_rejected=True)).version == 2
    assert it.here.model.table.get(2).rejected_reason == ""


async def test_a_rejection_that_cannot_be_cleared_keeps_no_slot(
    it: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    await it.push(2)
    await it.here.model.serving.reject(2, "it babbles")

    async def full(*_: object) -> None:
        raise WeightSyncError(Reason.DISK_EXHAUSTED, "No space left on device")

    monkeypatch.setattr(it.here.model.store, "write_marks", full)
    await _refused(it, Reason.DISK_EXHAUSTED, "No space left", version=2, clear_rejected=True)
    assert it.leases() == {1: 1, 2: 0}
    assert it.engine.calls[-1] == "release"
    assert it.engine.serves == 1
    monkeypatch.undo()
    # Both slots are as before: one more push finds one.
    await it.push(3)
    assert (await it.apply(3)).version == 3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"d": ("U8", (1,), b"x")}, "d is extra"),
        ({"b": ("BF16", (4, 8), bytes(64))}, "tensor b"),
        ({"b": ("F16", (8, 4), bytes(64))}, "tensor b"),
        ({"c": None}, "c is missing"),
    ],
)
async def test_tensors_that_are_not_the_models(
    it: Plant, change: dict[str, Any], named: str
) -> None:
    kinds = {k: v for k, v in (checkpoint(2) | change).items() if v is not None}
    # As if nobody could be asked when the layout came.
    it.here.model.accepted.asks.clear()
    await it.here.push([make_shard(0, [(name, *kind) for name, kind in kinds.items()])], 2)
    before = list(it.engine.events)
    await _refused(it, Reason.ENGINE_REFUSED, named, version=2)
    assert it.engine.events == before, "refused before the pause"
    assert it.leases()[2] == 0
    assert it.engine.calls[-1] == "release", "the ranks drop what they prepared"
    assert it.keeper.serving


async def test_a_refusal_names_the_first_tensors_and_tells_all_that_were_named(
    it: Plant, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"layer.{index:02}" for index in range(14)]
    more = dict.fromkeys(names, ("U8", (1,), b"x"))
    kinds = checkpoint(2) | more
    # As if nobody could be asked when the layout came.
    it.here.model.accepted.asks.clear()
    await it.here.push([make_shard(0, [(name, *kind) for name, kind in kinds.items()])], 2)
    error = await _refused(
        it, Reason.ENGINE_REFUSED, "(layer.00, layer.01, layer.02 and 11 more)", version=2
    )
    assert json.loads(error.metadata["tensors"]) == names[:10]
    assert error.message in caplog.text
    assert it.outcomes() == {"refused": 1}


async def test_a_refused_apply_tells_what_was_probably_meant(it: Plant) -> None:
    kinds = {f"module.{name}": kind for name, kind in checkpoint(2).items()}
    # As if nobody could be asked when the layout came.
    it.here.model.accepted.asks.clear()
    await it.here.push([make_shard(0, [(name, *kind) for name, kind in kinds.items()])], 2)
    remedy = "remove the prefix 'module.' from the names"
    await _refused(it, Reason.ENGINE_REFUSED, remedy, version=2)
    assert it.keeper.serving


async def test_a_bit_flipped_in_a_segment_after_it_was_staged(it: Plant) -> None:
    await it.push(2)
    slot = it.here.model.table.get(2).slot
    assert slot is not None
    shard = shards(2)[0]
    slot.ordered()[0].view[len(shard.data) - 1] ^= 1
    before = list(it.engine.events)
    await _refused(it, Reason.DATA_CORRUPT, "tensor", version=2)
    assert it.engine.events == before
    assert it.engine.serves == 1


async def test_a_wrong_write_is_restored(it: Plant) -> None:
    await it.push(2)
    it.engine.wrong = [bytes(256)]
    error = await _refused(
        it, Reason.APPLY_RESTORED, "version 1 was restored", "a does not hold", version=2
    )
    assert error.metadata["apply_id"]
    assert it.engine.serves == it.engine.version == it.here.model.serving.live == 1
    assert it.engine.events[-4:] == ["pause", "commit", "commit", "resume"]
    assert it.here.model.table.get(2).serving == pb.SERVING_REJECTED
    assert it.leases() == {1: 1, 2: 0}
    assert it.journal.live == (1, 0)
    assert it.outcomes() == {"restored": 1}
    assert (await it.apply(0)).outcome == pb.APPLY_OUTCOME_ALREADY_LIVE
    assert it.keeper.serving


async def test_the_way_back_outlives_a_restored_apply(it: Plant) -> None:
    await it.push(2, 3)
    await it.apply(2)
    it.engine.wrong = [bytes(256)]
    await _refused(it, Reason.APPLY_RESTORED, version=3)
    assert it.journal.live == (2, 1)
    assert it.here.model.serving.rollback_to == 1


async def test_when_the_restore_fails_too_the_engine_is_fenced_then_placed_again(
    it: Plant,
) -> None:
    await it.push(2)
    it.engine.wrong = [bytes(256), bytes(256)]
    hold = asyncio.Event()
    it.engine.before["state"] = hold.wait
    await _refused(it, Reason.ENGINE_FENCED, "serves nothing", version=2)
    assert it.engine.events[-4:] == ["pause", "commit", "commit", "fence"]
    assert it.engine.serves == 0
    assert not it.keeper.serving
    assert not it.serving[-1]
    assert it.outcomes() == {"fenced": 1}
    assert it.count("weightsync_fenced") == 1
    hold.set()
    await it.ready()
    assert it.engine.serves == it.here.model.serving.live == 1
    assert it.count("weightsync_fenced") == 0
    assert it.leases() == {1: 1, 2: 0}
    assert (await it.apply(2)).version == 2


async def test_a_rank_that_echoes_the_digest_without_its_apply_id(it: Plant) -> None:
    await it.push(2)
    wanted = it.here.model.table.get(2).content_digest

    def lie(replies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        it.engine.after.pop("commit")
        return [reply | {"apply_id": "stale", "content_digest": wanted} for reply in replies]

    it.engine.after["commit"] = lie
    await _refused(it, Reason.APPLY_RESTORED, "answered for apply 'stale'", version=2)
    assert it.engine.serves == 1


@pytest.mark.parametrize("replies", [[], [{}, {}]])
async def test_missing_and_additional_replies_are_no_success(
    it: Plant, replies: list[dict[str, Any]]
) -> None:
    await it.push(2)

    def lose(_: Any) -> list[dict[str, Any]]:
        it.engine.after.pop("commit")
        return replies

    it.engine.after["commit"] = lose
    await _refused(it, Reason.APPLY_RESTORED, "ranks answered", version=2)
    assert it.engine.serves == 1


async def test_an_engine_that_dies_in_the_commit(it: Plant) -> None:
    await it.push(2)

    def die() -> None:
        for name in ("health", "fence", "resume", "state", "hello"):
            it.engine.before[name] = _away()
        raise WeightSyncError(Reason.ENGINE_AWAY, "the process is gone")

    it.engine.before["commit"] = die
    await _refused(it, Reason.ENGINE_FENCED, "the process is gone", version=2)
    assert it.engine.serves == 0
    await it.until(pb.ENGINE_STATE_AWAY)
    # Its workers may live on for a while, and read what they were told to write.
    assert it.leases() == {1: 0, 2: 1}
    error = await _refused(it, Reason.ENGINE_AWAY, version=2)
    assert error.retry_after_s
    it.engine.before.clear()
    it.engine.restart(tensors(1))
    await it.ready()
    assert it.engine.serves == 1
    assert it.leases() == {1: 1, 2: 0}


async def test_an_engine_that_restarts_between_prepare_and_commit(it: Plant) -> None:
    await it.push(2, 3)
    await it.apply(2)

    def restart() -> None:
        it.engine.before.pop("pause")
        it.engine.restart(tensors(1))

    it.engine.before["pause"] = restart
    await _refused(it, Reason.ENGINE_FENCED, "not prepared", version=3)
    await it.ready()
    # The live version was placed into the new engine; its disk weights were never served.
    assert it.engine.serves == it.here.model.serving.live == 2
    assert it.leases()[3] == 0
    assert (await it.apply(3)).version == 3


async def test_an_engine_that_restarted_unseen_is_not_applied_to(it: Plant) -> None:
    await it.push(2)

    def restart() -> None:
        # As the apply looks: whoever watches the engine has not seen it.
        if asyncio.current_task() is not it.keeper._task:
            del it.engine.before["health"]
            it.engine.restart(tensors(1))

    it.engine.before["health"] = restart
    with pytest.raises(WeightSyncError) as caught:
        await it.apply(2)
    assert caught.value.reason is Reason.ENGINE_AWAY
    await it.ready()
    assert it.engine.serves == 1


async def test_a_resume_whose_answer_is_lost_is_asked_for(it: Plant) -> None:
    await it.push(2)

    def lost(answer: Any) -> Any:
        raise WeightSyncError(Reason.ENGINE_AWAY, "the reply was lost")

    it.engine.after["resume"] = lost
    assert (await it.apply(2)).version == 2
    assert it.engine.events.count("resume") == 2, "that of the start and this one"
    assert it.engine.serves == it.here.model.serving.live == 2
    assert it.journal.live == (2, 1)
    assert it.leases() == {1: 0, 2: 1}


async def test_a_resume_that_fails_is_tried_again(it: Plant) -> None:
    await it.push(2)
    tries = 0

    def fail() -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise WeightSyncError(Reason.ENGINE_AWAY, "the request was lost")

    it.engine.before["resume"] = fail
    assert (await it.apply(2)).version == 2
    assert tries == 3
    assert it.engine.serves == 2


async def test_a_resume_that_fails_for_long_is_not_served_until_it_succeeds(it: Plant) -> None:
    await it.push(2)
    tries = 0

    def fail() -> None:
        nonlocal tries
        tries += 1
        if tries < 8:
            raise WeightSyncError(Reason.ENGINE_AWAY, "the request was lost")

    it.engine.before["resume"] = fail
    await _refused(it, Reason.ENGINE_AWAY, "every rank holds version 2", version=2)
    assert it.serving[-1] is False
    assert it.count("weightsync_fenced") == 1
    await it.ready()
    assert tries == 8
    assert it.engine.serves == it.here.model.serving.live == 2
    assert it.journal.live == (2, 1)
    assert it.leases() == {1: 0, 2: 1}


async def test_a_pause_that_ended_before_the_commit_came_is_no_reason_to_fence(it: Plant) -> None:
    await it.push(2)

    async def ran_out() -> None:
        it.engine.before.pop("commit")
        (digest,) = {it.here.model.table.get(1).content_digest}
        await MemoryEngine.resume(it.engine, it.engine._lease.id, 1, digest)
        raise WeightSyncError(Reason.ENGINE_REFUSED, "the engine generates")

    it.engine.before["commit"] = ran_out
    await _refused(it, Reason.ENGINE_AWAY, "apply again", version=2)
    assert "fence" not in it.engine.events
    await it.ready()
    assert it.engine.serves == 1
    assert (await it.apply(2)).version == 2


async def test_a_pause_whose_answer_is_lost(it: Plant) -> None:
    await it.push(2)

    def lost(answer: Any) -> Any:
        it.engine.after.pop("pause")
        raise WeightSyncError(Reason.ENGINE_AWAY, "the reply was lost")

    it.engine.after["pause"] = lost
    await _refused(it, Reason.ENGINE_AWAY, version=2)
    await until(lambda: it.engine.serves == 1)
    await it.ready()
    assert it.leases() == {1: 1, 2: 0}
    assert (await it.apply(2)).version == 2


async def test_a_fault_of_ours_in_the_pause_leaves_nothing_half_written(it: Plant) -> None:
    await it.push(2)

    def garbage(replies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        it.engine.after.pop("commit")
        it.engine.live["a"] = bytes(256)
        it.engine._content, it.engine._dirty = "", True
        return [replies[0] | {"written_bytes": "many"}]

    it.engine.after["commit"] = garbage
    with pytest.raises(ValueError, match="many"):
        await it.apply(2)
    assert it.engine.serves == 0
    assert not it.keeper.serving
    await it.ready()
    assert it.engine.serves == 1
    assert it.leases() == {1: 1, 2: 0}


async def test_a_journal_that_cannot_be_written_stops_an_apply_before_the_pause(
    it: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    await it.push(2)
    before = list(it.engine.events)

    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(it.journal._file, "write", full)
    await _refused(it, Reason.DISK_EXHAUSTED, "No space left", version=2)
    assert it.engine.events == before
    assert it.leases() == {1: 1, 2: 0}
    assert it.keeper.serving
    monkeypatch.undo()
    assert (await it.apply(2)).version == 2


async def test_a_cancelled_caller_changes_nothing(it: Plant) -> None:
    await it.push(2)
    go = asyncio.Event()
    it.engine.before["commit"] = go.wait
    task = asyncio.ensure_future(it.apply(2, idempotency_key="k"))
    await until(lambda: "commit" in it.engine.calls)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    again = asyncio.ensure_future(it.apply(2, idempotency_key="k"))
    await asyncio.sleep(0.02)
    go.set()
    report = await again
    assert (report.version, report.outcome) == (2, pb.APPLY_OUTCOME_APPLIED)
    assert it.engine.events.count("commit") == 1
    assert it.engine.serves == 2


async def test_a_repeated_key_gets_the_first_answer(it: Plant) -> None:
    await it.push(2, 3)
    first = await it.apply(0, idempotency_key="k")
    await it.push(4)
    assert await it.apply(0, idempotency_key="k") == first
    assert it.engine.serves == 3
    assert it.outcomes() == {"applied": 1}


async def test_a_key_of_another_request_is_refused(it: Plant) -> None:
    await it.push(2, 3)
    await it.apply(2, idempotency_key="k")
    await _refused(it, Reason.REQUEST_INVALID, "idempotency_key", version=3, idempotency_key="k")
    with pytest.raises(WeightSyncError, match="idempotency_key"):
        await it.rollback(idempotency_key="k")
    assert it.engine.serves == 2


async def test_a_refusal_is_no_answer_for_ever(it: Plant) -> None:
    await _refused(it, Reason.VERSION_UNKNOWN, version=2, idempotency_key="k")
    await it.push(2)
    assert (await it.apply(2, idempotency_key="k")).version == 2


async def test_a_restored_apply_is_not_tried_again_under_its_key(it: Plant) -> None:
    await it.push(2)
    it.engine.wrong = [bytes(256)]
    for _ in range(2):
        await _refused(it, Reason.APPLY_RESTORED, version=2, idempotency_key="k")
    assert it.engine.events.count("pause") == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"idempotency_key": "k" * 129},
        {"prepare_timeout": duration_pb2.Duration(seconds=-1)},
        {"prepare_timeout": duration_pb2.Duration(seconds=3601)},
        {"pause": pb.PauseOptions(mode=7)},  # type: ignore[arg-type]
    ],
)
async def test_requests_that_make_no_sense(it: Plant, fields: dict[str, Any]) -> None:
    await _refused(it, Reason.REQUEST_INVALID, version=1, **fields)


async def test_applies_wait_for_each_other(it: Plant) -> None:
    await it.push(2, 3)
    reports = await asyncio.gather(it.apply(2), it.apply(3), it.apply(3))
    assert [report.version for report in reports] == [2, 3, 3]
    assert reports[2].outcome == pb.APPLY_OUTCOME_ALREADY_LIVE
    assert it.engine.serves == 3


async def test_callers_beyond_measure_are_told_to_wait(it: Plant) -> None:
    async with it.keeper._lock:
        tasks = [asyncio.ensure_future(it.apply(1)) for _ in range(40)]
        await until(lambda: sum(task.done() for task in tasks) >= 8)
        await asyncio.sleep(0.01)
        busy = [task for task in tasks if task.done()]
        assert len(busy) == 8
        for task in busy:
            error = task.exception()
            assert isinstance(error, WeightSyncError)
            assert error.reason is Reason.APPLY_BUSY
    await asyncio.gather(*(task for task in tasks if task not in busy))


async def test_an_apply_while_the_engine_is_fenced(it: Plant) -> None:
    await it.push(2)
    # Nobody lifts the fence meanwhile.
    async with it.keeper._lock:
        it.keeper.suspect("somebody said so")
        error = await _refused(it, Reason.ENGINE_FENCED, "somebody said so", version=2)
    assert "tries again" in error.message
    assert it.outcomes() == {"refused": 1}, "nothing was begun, so nothing was fenced by it"
    await it.ready()


async def test_an_apply_while_the_ranks_are_asked_is_told_so_at_once(it: Plant) -> None:
    await it.push(2)
    hold = asyncio.Event()
    it.engine.before["state"] = hold.wait
    it.keeper.suspect("somebody said so")
    await it.until(pb.ENGINE_STATE_RECONCILING)
    error = await _refused(it, Reason.ENGINE_AWAY, "what every rank holds", version=2)
    assert error.retry_after_s
    hold.set()
    await it.ready()


async def test_an_apply_while_the_engine_sleeps(it: Plant) -> None:
    await it.push(2)
    it.engine.sleeping = True
    await _refused(it, Reason.ENGINE_ASLEEP, "wake the engine up", version=2)
    it.engine.sleeping = False
    assert (await it.apply(2)).version == 2


async def test_rollback_goes_back_and_rejects(it: Plant) -> None:
    await it.push(2)
    await it.apply(2)
    answer = await it.rollback(reason="it babbles")
    assert (answer.report.version, answer.rejected_version) == (1, 2)
    assert it.engine.serves == it.here.model.serving.live == 1
    left = it.here.model.table.get(2)
    assert (left.serving, left.rejected_reason) == (pb.SERVING_REJECTED, "it babbles")
    assert (await it.apply(0)).outcome == pb.APPLY_OUTCOME_ALREADY_LIVE
    with pytest.raises(WeightSyncError) as caught:
        await it.rollback()
    assert caught.value.reason is Reason.NO_ROLLBACK


async def test_what_was_rolled_back_does_not_come_back_under_another_number(it: Plant) -> None:
    await it.push(2)
    await it.here.push(shards(2), version=3)
    await it.apply(3)
    assert (await it.rollback()).rejected_version == 3
    assert (await it.apply(0)).outcome == pb.APPLY_OUTCOME_ALREADY_LIVE
    assert it.engine.serves == 1


async def test_a_repeated_rollback_goes_back_once(it: Plant) -> None:
    await it.push(2, 3)
    await it.apply(2)
    await it.apply(3)
    first = await it.rollback(idempotency_key="k")
    assert await it.rollback(idempotency_key="k") == first
    assert it.engine.serves == 2


async def test_a_rollback_that_cannot_be_marked_is_still_told_as_done(
    it: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    await it.push(2)
    await it.apply(2)

    async def full(*_: object) -> None:
        raise WeightSyncError(Reason.DISK_EXHAUSTED, "full")

    monkeypatch.setattr(it.here.model.serving, "reject", full)
    answer = await it.rollback()
    assert (answer.report.version, answer.rejected_version) == (1, 0)
    assert it.engine.serves == 1


async def test_a_reason_that_is_too_long(it: Plant) -> None:
    with pytest.raises(WeightSyncError, match="1024"):
        await it.rollback(reason="x" * 1025)


async def test_verify_proves_what_is_served(it: Plant) -> None:
    answer = await it.verify()
    assert answer.verified
    assert answer.version == 1
    assert [rank.content_digest for rank in answer.ranks] == [answer.content_digest]


async def test_verify_of_another_version_tells_the_difference_and_changes_nothing(
    it: Plant,
) -> None:
    await it.push(2)
    answer = await it.verify(2)
    assert not answer.verified
    assert "differs in a, b, c" in answer.ranks[0].error
    assert it.engine.serves == 1
    assert it.leases() == {1: 1, 2: 0}
    assert (await it.verify(1)).verified
    assert it.metrics.violations()["never_mixed"] == 0


async def test_a_bit_flipped_in_a_live_parameter_is_found_and_healed(it: Plant) -> None:
    it.engine.live["b"] = b"\xff" + it.engine.live["b"][1:]
    answer = await it.verify()
    assert not answer.verified
    assert "b" in answer.ranks[0].error
    assert it.metrics.violations()["never_mixed"] == 1
    await until(lambda: it.engine.live == tensors(1))
    await it.ready()
    assert it.engine.serves == 1


async def test_a_verify_that_is_cancelled_changes_nothing(it: Plant) -> None:
    go = asyncio.Event()
    it.engine.before["verify"] = go.wait
    task = asyncio.ensure_future(it.verify())
    await until(lambda: "verify" in it.engine.calls)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()
    assert it.keeper.serving
    assert (await it.verify()).verified
