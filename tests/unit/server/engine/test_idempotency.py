"""What repeated calls are told when nobody saw the end of the first one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import xxhash

from tests.unit.server.engine.plant import Engine, Plant, cut_journal, plant, shards, tensors
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.engine import idempotency
from weightsync_server.engine.journal import Entry, Journal, JournalFile
from weightsync_server.engine.outcome import ApplyCause

if TYPE_CHECKING:
    from collections.abc import Callable

_KEYED = pb.ApplyVersionRequest(model="m", version=2, idempotency_key="k")


def _lost(times: int) -> Callable[[], None]:
    left = times

    def fail() -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise WeightSyncError(Reason.ENGINE_AWAY, "the request was lost")

    return fail


async def test_a_rollback_that_nobody_saw_the_end_of_goes_back_once(it: Plant) -> None:
    await it.push(2, 3)
    await it.apply(2)
    await it.apply(3)
    it.engine.before["resume"] = _lost(7)
    with pytest.raises(WeightSyncError) as caught:
        await it.rollback(idempotency_key="k", reason="it babbles")
    assert caught.value.reason is Reason.ENGINE_AWAY
    await it.ready()
    answer = await it.rollback(idempotency_key="k", reason="it babbles")
    assert (answer.report.version, answer.rejected_version) == (2, 3)
    assert it.engine.serves == it.here.model.serving.live == 2
    assert it.here.model.table.get(3).rejected_reason == "it babbles"
    assert await it.rollback(idempotency_key="k", reason="it babbles") == answer


async def test_the_next_server_tells_all_of_the_first_answer(
    tmp_path: Path, engine: Engine
) -> None:
    async with plant(tmp_path, engine, durable=True) as it:
        await it.ready()
        await it.push(2, 3)
        applied = await it.apply(0, idempotency_key="k")
        back = await it.rollback(idempotency_key="b")
        engine.wrong = [bytes(256)]
        await it.push(4)
        with pytest.raises(WeightSyncError) as first:
            await it.apply(4, idempotency_key="r", clear_rejected=True)
    before = list(engine.events)
    async with plant(tmp_path, engine, durable=True) as it:
        # Told at once, also before the engine is known.
        assert await it.apply(0, idempotency_key="k") == applied
        assert await it.rollback(idempotency_key="b") == back
        with pytest.raises(WeightSyncError) as again:
            await it.apply(4, idempotency_key="r", clear_rejected=True)
        assert again.value.reason is first.value.reason is Reason.APPLY_RESTORED
        assert again.value.message == first.value.message
        assert again.value.metadata == first.value.metadata
        await it.ready()
        assert engine.events == before, "nothing is done again"
        assert it.outcomes() == {}


async def test_an_apply_that_did_not_come_about_is_made_when_it_is_repeated(
    tmp_path: Path, engine: Engine
) -> None:
    async with plant(tmp_path, engine, durable=True) as it:
        await it.ready()
        await it.push(2)
    book = JournalFile(tmp_path / "journal")
    book.write(Entry("INTENT", "x", 2, 1, idempotency.cause(_KEYED)))
    book.close()
    # Half of it is written.
    engine.live["a"] = tensors(2)["a"]
    engine._content, engine._dirty = "", True
    async with plant(tmp_path, engine, durable=True) as it:
        await it.ready()
        assert engine.serves == 1
        report = await it.apply(2, idempotency_key="k")
        assert (report.outcome, report.version) == (pb.APPLY_OUTCOME_APPLIED, 2)
        assert report.apply_id != "x"
        assert engine.serves == 2


async def test_of_versions_with_one_content_the_intended_one_is_live(
    tmp_path: Path, engine: Engine
) -> None:
    async with plant(tmp_path, engine, durable=True) as it:
        await it.ready()
        await it.push(2)
        await it.here.push(shards(2), 3)
        await it.apply(2)
    cut_journal(tmp_path)
    async with plant(tmp_path, engine, durable=True) as it:
        await it.ready()
        assert it.here.model.serving.live == 2


def test_a_version_is_live_in_journals_of_before_too(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    body = b'{"event": "DONE", "apply_id": "a", "version": 2, "previous": 1}'
    path.write_bytes(xxhash.xxh3_64_hexdigest(body).encode() + b" " + body + b"\n")
    book = JournalFile(path)
    book.close()
    assert Journal(book).last == Entry("DONE", "a", 2, 1)


def _done(number: int, reply: pb.ApplyVersionResponse) -> Entry:
    cause = ApplyCause(f"k{number}", "request")
    return Entry("DONE", "a", number, number - 1, cause, idempotency.pack(reply))


def _size(path: Path) -> int:
    return path.stat().st_size


@pytest.mark.parametrize(("ranks", "kept"), [(0, 256), (60, 60)])
def test_answers_are_kept_in_number_and_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, kept: int
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    path = tmp_path / "journal"
    report = pb.ApplyReport(ranks=[pb.RankResult(rank="0/0/0", error="x" * 90)] * ranks)
    reply = pb.ApplyVersionResponse(report=report)
    book = JournalFile(path)
    for number in range(1, 401):
        book.write(_done(number, reply))
        assert _size(path) < (1 << 20) + (16 << 10)
    book.close()
    again = JournalFile(path)
    again.close()
    found = [number for number in range(1, 401) if again.answered(f"k{number}")]
    assert kept <= len(found) <= 256
    assert found == list(range(401 - len(found), 401)), "the newest"
    assert _size(path) <= 1 << 19
    assert Journal(again).live == (400, 399)


def test_an_answer_that_is_too_large_is_kept_without_its_ranks() -> None:
    ranks = [pb.RankResult(rank=f"0/0/{rank}", error="x" * 100) for rank in range(1000)]
    reply = pb.RollbackResponse(report=pb.ApplyReport(version=2, ranks=ranks), rejected_version=3)
    assert len(idempotency.pack(reply).reply) < 100
    assert len(reply.report.ranks) == 1000
    long = WeightSyncError(Reason.APPLY_RESTORED, "ä" * 5000)
    assert len(idempotency.pack_refusal(long).refusal.encode()) <= 4096
