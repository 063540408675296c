"""What becomes of applies is remembered: each, in order, over restarts, whatever the disk does."""

from __future__ import annotations

import asyncio
import errno
import json
from typing import TYPE_CHECKING

import pytest

from tests.support.disks import FailingDisk
from tests.unit.server.engine.plant import Plant, plant, tensors, until
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.engine.apply_history import ApplyHistory

if TYPE_CHECKING:
    from pathlib import Path


_HUGE = json.dumps({"number": str(2**64 - 1), "version": "9"}).encode() + b"\n"


async def _opened(folder: Path, limit: int = 3) -> ApplyHistory:
    history = ApplyHistory(limit)
    await history.open(folder / "applies.jsonl")
    return history


def _applied(version: int, who: str = "ada") -> pb.ApplyRecord:
    return pb.ApplyRecord(
        kind=pb.APPLY_KIND_APPLY,
        requested_by=who,
        version=version,
        result=pb.APPLY_RESULT_APPLIED,
    )


def _refused(version: int, who: str = "ada") -> pb.ApplyRecord:
    entry = _applied(version, who)
    entry.result, entry.reason = pb.APPLY_RESULT_REFUSED, "it is not there"
    return entry


def _versions(history: ApplyHistory) -> list[int]:
    return [entry.version for entry in history.newest_first()]


async def test_the_last_ones_are_kept_over_a_restart(tmp_path: Path) -> None:
    history = await _opened(tmp_path)
    for version in range(1, 6):
        history.add(_applied(version))
    await history.close()
    history = await _opened(tmp_path)
    assert _versions(history) == [5, 4, 3]
    history.add(_applied(6))
    assert [entry.number for entry in history.newest_first()] == [6, 5, 4]
    assert [entry.requested_by for entry in history.newest_first()] == ["ada"] * 3
    await history.close()
    assert _versions(await _opened(tmp_path, limit=2)) == [6, 5]


async def test_the_file_stays_small(tmp_path: Path) -> None:
    history = await _opened(tmp_path)
    for version in range(1, 21):
        history.add(_applied(version))
        await history.close()
        lines = (tmp_path / "applies.jsonl").read_text().splitlines()
        assert len(lines) <= 6
        assert json.loads(lines[-1])["version"] == str(version)
    assert _versions(await _opened(tmp_path)) == [20, 19, 18]


async def test_who_asks_again_and_again_drives_nothing_out(tmp_path: Path) -> None:
    history = await _opened(tmp_path)
    history.add(_applied(1))
    for _ in range(50):
        history.add(_refused(9))
    history.add(_refused(9, "bob"))
    await history.close()
    for found in (history, await _opened(tmp_path)):
        shown = [(one.version, one.requested_by, one.times) for one in found.newest_first()]
        assert shown == [(9, "bob", 1), (9, "ada", 50), (1, "ada", 1)]


async def test_what_changed_something_is_never_merged(tmp_path: Path) -> None:
    history = await _opened(tmp_path)
    for _ in range(2):
        history.add(_applied(1))
    assert _versions(history) == [1, 1]
    await history.close()


@pytest.mark.parametrize(
    "tail",
    [b'{"number": "4", "ver', b"\0\0\0\0\n", b"[]\n", b"\xff\n", b"7", b"[" * 9999 + b"\n", _HUGE],
)
async def test_damaged_lines_are_left_out(
    tmp_path: Path, tail: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    history = await _opened(tmp_path)
    history.add(_applied(1))
    await history.close()
    path = tmp_path / "applies.jsonl"
    path.write_bytes(b"no JSON at all\n" + path.read_bytes() + tail)
    history = await _opened(tmp_path)
    assert _versions(history) == [1]
    assert [one.message for one in caplog.records if "damaged" in one.message]
    history.add(_applied(2))
    await history.close()
    for line in path.read_text().splitlines():
        json.loads(line)
    assert _versions(await _opened(tmp_path)) == [2, 1]


async def test_what_a_later_release_wrote_is_read(tmp_path: Path) -> None:
    line = {"number": "7", "kind": "APPLY_KIND_TELEPORT", "version": "3", "mood": "good"}
    (tmp_path / "applies.jsonl").write_text(json.dumps(line) + "\n")
    (found,) = (await _opened(tmp_path)).newest_first()
    assert (found.number, found.version, found.kind) == (7, 3, pb.APPLY_KIND_UNSPECIFIED)


async def test_a_file_that_cannot_be_read_prevents_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "applies.jsonl").mkdir()
    history = await _opened(tmp_path)
    history.add(_applied(1))
    await history.close()
    assert _versions(history) == [1]
    assert len(caplog.records) == 2, "that it is not read, and that it is not written"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
async def test_a_disk_that_takes_nothing_is_told_once_and_loses_nothing(
    tmp_path: Path, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    history = await _opened(tmp_path)
    history.add(_applied(1))
    await history.close()
    with pytest.MonkeyPatch.context() as patch:
        FailingDisk(1, OSError(code, "no"), ("write",), for_ever=True).install(patch)
        for version in (2, 3):
            history.add(_applied(version))
            await history.close()
    (line,) = caplog.records
    assert "applies go on" in line.message
    history.add(_applied(4))
    await history.close()
    assert _versions(await _opened(tmp_path)) == [4, 3, 2]


async def test_a_record_is_bounded() -> None:
    history = ApplyHistory()
    report = pb.ApplyReport(
        ranks=[pb.RankResult(rank=f"0/0/{n}", error="x" * 90) for n in range(500)]
    )
    entry = _applied(1)
    entry.engines.append(pb.EngineReport(engine="e", report=report))
    history.add(entry)
    (kept,) = history.newest_first()
    assert kept.ByteSize() < 16 << 10
    assert (kept.engines[0].engine, len(kept.engines[0].report.ranks)) == ("e", 0)
    assert len(entry.engines[0].report.ranks) == 500, "the answer to the caller is another matter"


@pytest.mark.parametrize(
    ("reason", "begun", "result"),
    [
        (Reason.APPLY_RESTORED, True, pb.APPLY_RESULT_RESTORED),
        (Reason.ENGINE_FENCED, True, pb.APPLY_RESULT_FENCED),
        (Reason.ENGINE_FENCED, False, pb.APPLY_RESULT_REFUSED),
        (Reason.ENGINE_AWAY, True, pb.APPLY_RESULT_INTERRUPTED),
        (Reason.ENGINE_AWAY, False, pb.APPLY_RESULT_REFUSED),
    ],
)
async def test_how_it_ended_depends_on_whether_it_had_begun(
    reason: Reason, begun: bool, result: int
) -> None:
    history, facts = ApplyHistory(), {"apply_id": "a1"} if begun else {}
    with pytest.raises(WeightSyncError), history.recorded(pb.ApplyRecord()):
        raise WeightSyncError(reason, "it failed", metadata=facts)
    (kept,) = history.newest_first()
    assert (kept.result, kept.apply_id) == (result, facts.get("apply_id", ""))


async def test_a_server_that_stops_in_an_apply_records_that() -> None:
    history = ApplyHistory()
    with pytest.raises(asyncio.CancelledError), history.recorded(pb.ApplyRecord()):
        raise asyncio.CancelledError
    (kept,) = history.newest_first()
    assert kept.result == pb.APPLY_RESULT_INTERRUPTED
    assert "CancelledError" in kept.reason


async def test_any_sentence_can_be_recorded() -> None:
    history = ApplyHistory()
    with pytest.raises(WeightSyncError), history.recorded(pb.ApplyRecord()):
        raise WeightSyncError(Reason.REQUEST_INVALID, "no folder \udcff" + "y" * 10_000)
    (kept,) = history.newest_first()
    assert kept.reason.startswith("no folder ?")
    assert len(kept.reason) == 2000


def _last(it: Plant) -> pb.ApplyRecord:
    return next(it.keeper.context.history.newest_first())


async def test_an_apply_is_recorded_with_all_that_it_did(it: Plant) -> None:
    await it.push(2)
    request = pb.ApplyVersionRequest(model="m", order=pb.ENGINE_ORDER_TOGETHER)
    await it.applier.apply(request, who="ada", cause="she felt like it")
    last = _last(it)
    assert (last.kind, last.result) == (pb.APPLY_KIND_APPLY, pb.APPLY_RESULT_APPLIED)
    assert (last.requested_by, last.cause) == ("ada", "she felt like it")
    assert (last.previous_version, last.version) == (1, 2)
    assert last.order == pb.ENGINE_ORDER_TOGETHER
    assert (last.reason, last.error_reason, last.times) == ("", "", 1)
    assert last.apply_id
    assert last.content_digest == it.here.model.table.get(2).content_digest
    assert last.written_bytes > 0
    assert last.strategy == pb.APPLY_STRATEGY_COPY
    assert last.phases.paused_total.ToNanoseconds() > 0
    assert last.took.ToNanoseconds() >= last.phases.paused_total.ToNanoseconds()
    assert last.pause.mode == pb.PAUSE_MODE_KEEP
    assert (last.slowest.engine, last.slowest.rank) == ("engine", "0/0/0")
    assert [one.engine for one in last.engines] == ["engine"]


async def test_a_start_is_recorded_with_its_reason(it: Plant) -> None:
    (first,) = it.keeper.context.history.newest_first()
    assert (first.kind, first.requested_by) == (pb.APPLY_KIND_RECOVERY, "server")
    assert (first.previous_version, first.version) == (0, 1)
    assert first.cause == "this server connected to the engine"


async def test_an_engine_that_comes_back_as_it_left_is_no_apply(it: Plant) -> None:
    def away() -> None:
        raise WeightSyncError(Reason.ENGINE_AWAY, "nobody listens")

    it.engine.before["health"] = away
    await it.until(pb.ENGINE_STATE_AWAY)
    it.engine.before.clear()
    await it.ready()
    assert len([*it.keeper.context.history.newest_first()]) == 1


async def test_a_version_that_is_placed_again_is_recorded(it: Plant) -> None:
    await it.bring(2)
    it.engine.restart(tensors(1))
    await until(lambda: _last(it).kind == pb.APPLY_KIND_RECOVERY)
    assert it.engine.serves == 2
    assert (_last(it).previous_version, _last(it).version) == (2, 2)


async def test_a_rollback_is_recorded_with_its_reason(it: Plant) -> None:
    await it.bring(2)
    await it.applier.rollback(pb.RollbackRequest(model="m", reason="it babbles"), who="bob")
    last = _last(it)
    assert (last.kind, last.result) == (pb.APPLY_KIND_ROLLBACK, pb.APPLY_RESULT_APPLIED)
    assert (last.requested_by, last.cause) == ("bob", "it babbles")
    assert (last.previous_version, last.version) == (2, 1)


async def test_what_is_refused_is_recorded(it: Plant) -> None:
    with pytest.raises(WeightSyncError):
        await it.apply(9)
    last = _last(it)
    assert (last.result, last.version, last.previous_version) == (pb.APPLY_RESULT_REFUSED, 9, 1)
    assert last.error_reason == "VERSION_UNKNOWN"
    assert "no version 9" in last.reason
    assert not last.HasField("phases")
    assert it.outcomes() == {"refused": 1}


async def test_dry_runs_and_what_was_live_are_recorded(it: Plant) -> None:
    await it.push(2)
    await it.apply(2, dry_run=True)
    assert _last(it).result == pb.APPLY_RESULT_PLANNED
    await it.apply(1)
    assert _last(it).result == pb.APPLY_RESULT_ALREADY_LIVE
    assert not _last(it).HasField("phases")


async def test_a_restored_apply_is_recorded(it: Plant) -> None:
    await it.push(2)
    it.engine.wrong = [bytes(256)]
    with pytest.raises(WeightSyncError) as caught:
        await it.apply(2)
    last = _last(it)
    assert last.result == pb.APPLY_RESULT_RESTORED
    assert (last.previous_version, last.version) == (1, 2)
    assert last.apply_id == caught.value.metadata["apply_id"]
    assert last.reason == caught.value.message
    assert it.outcomes() == {"restored": 1}


async def test_a_fenced_engine_is_recorded_and_that_it_is_placed_again(it: Plant) -> None:
    await it.push(2)
    it.engine.wrong = [bytes(256), bytes(256)]
    with pytest.raises(WeightSyncError):
        await it.apply(2)
    results = [one.result for one in it.keeper.context.history.newest_first()]
    assert pb.APPLY_RESULT_FENCED in results
    await it.ready()
    last = _last(it)
    assert (last.kind, last.version) == (pb.APPLY_KIND_RECOVERY, 1)
    assert "serves nothing" in last.cause


async def test_a_call_that_is_repeated_is_one_apply(it: Plant) -> None:
    await it.push(2)
    for _ in range(2):
        await it.apply(2, idempotency_key="k")
    kinds = [one.kind for one in it.keeper.context.history.newest_first()]
    assert kinds == [pb.APPLY_KIND_APPLY, pb.APPLY_KIND_RECOVERY]


async def test_an_apply_succeeds_whose_record_the_disk_refuses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with plant(tmp_path) as it:
        await it.ready()
        history = it.keeper.context.history
        # A folder in its place takes nothing.
        (tmp_path / "applies.jsonl").mkdir()
        await history.open(tmp_path / "applies.jsonl")
        await it.push(2)
        assert (await it.apply(2)).version == 2
        await it.rollback()
        await history.close()
        assert [one.version for one in history.newest_first()] == [1, 2, 1]
    assert len([one for one in caplog.records if "is not written" in one.message]) == 1
