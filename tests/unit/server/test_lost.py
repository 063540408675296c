"""What a start finds that no crash leaves."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.unit.server.engine.plant import Engine, cut_journal, hurry, plant, tensors
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.engine import JournalFile, idempotency
from weightsync_server.engine.journal import Entry, live_in_store
from weightsync_server.invariants import count_lost
from weightsync_server.ops.metrics import INVARIANTS, Metrics
from weightsync_server.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

_NONE = dict.fromkeys(INVARIANTS, 0)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path / "segments.sock")


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


async def _lived(folder: Path, engine: Engine) -> None:
    """Let a server make version 2 live and end; version 3 is there, too."""
    async with plant(folder, engine, durable=True) as it:
        await it.ready()
        await it.push(2, 3)
        await it.apply(2)


async def _violations(folder: Path, store: str = "") -> dict[str, int]:
    """Return what a start counts."""
    metrics = Metrics("m")
    url = store or f"file://{folder / 'store'}"
    opened = open_store(url)
    records = await opened.open()
    book = JournalFile(folder / "journal", opened.url if opened.durable else "")
    book.close()
    known = {record.version for record in records}
    for version in live_in_store(book):
        count_lost(opened, known, version, metrics)
    return metrics.violations()


def _folder(folder: Path, version: int) -> Path:
    return folder / "store" / "m" / f"v{version}"


async def test_a_start_after_a_clean_life_or_a_crash_counts_nothing(
    tmp_path: Path, engine: Engine
) -> None:
    assert await _violations(tmp_path) == _NONE
    await _lived(tmp_path, engine)
    assert await _violations(tmp_path) == _NONE
    # As after a crash in an apply of version 3.
    book = JournalFile(tmp_path / "journal")
    book.write(Entry("INTENT", "x", 3, 2))
    book.close()
    assert await _violations(tmp_path) == _NONE
    # Somebody chose another store: that it does not know the version is no wonder.
    for other in (f"file://{tmp_path / 'other'}", "memory://"):
        assert await _violations(tmp_path, other) == _NONE


async def test_the_live_version_is_gone(tmp_path: Path, engine: Engine) -> None:
    await _lived(tmp_path, engine)
    shutil.rmtree(_folder(tmp_path, 2))
    assert await _violations(tmp_path) == _NONE | {"crash_safe": 1}


@pytest.mark.parametrize("name", ["0.safetensors", "manifest.json", "commit.json"])
async def test_a_version_that_was_committed_is_not_whole(
    tmp_path: Path, engine: Engine, name: str
) -> None:
    await _lived(tmp_path, engine)
    path = _folder(tmp_path, 3) / name
    path.write_bytes(path.read_bytes()[:-1])
    assert await _violations(tmp_path) == _NONE | {"crash_safe": 1}
    assert await _violations(tmp_path) == _NONE, "it was put aside"


async def test_the_ranks_hold_what_the_journal_does_not_know_of(
    tmp_path: Path, engine: Engine
) -> None:
    await _lived(tmp_path, engine)
    url = f"file://{tmp_path / 'store'}"
    # Somebody put version 3 there without a word.
    engine.live.update(tensors(3))
    async with plant(tmp_path, store=url) as other:
        engine._content = other.here.model.table.get(3).content_digest
    async with plant(tmp_path, engine, store=url) as it:
        await it.ready()
        assert it.metrics.violations() == _NONE | {"crash_safe": 1}
        # Proved, so it stays.
        assert engine.serves == it.here.model.serving.live == 3


@pytest.mark.parametrize("point", ["INTENT", "DONE"])
async def test_the_ranks_hold_what_was_intended_or_done(
    tmp_path: Path, engine: Engine, point: str
) -> None:
    await _lived(tmp_path, engine)
    if point == "INTENT":
        cut_journal(tmp_path)
    async with plant(tmp_path, engine, durable=True) as it:
        await it.ready()
        assert it.metrics.violations() == _NONE


async def test_a_call_that_was_answered_is_not_carried_out_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with plant(tmp_path) as it:
        await it.ready()
        await it.push(2, 3)
        await it.apply(2, idempotency_key="k")
        it.applier._calls._tasks.clear()
        # Whoever should know of the answer does not.
        monkeypatch.setattr(idempotency, "earlier_reply", lambda *_: None)
        with pytest.raises(WeightSyncError) as caught:
            await it.apply(3, idempotency_key="k")
        assert caught.value.reason is Reason.FAULT
        assert it.metrics.violations() == _NONE | {"idempotent": 1}
        assert it.engine.serves == 2
        assert it.engine.events.count("commit") == 1


def test_the_store_is_not_written_down_as_it_is(tmp_path: Path) -> None:
    book = JournalFile(tmp_path / "journal", "s3://key:secret@bucket")
    book.write(Entry("DONE", "a", 1, 0, store=book.store))
    book.close()
    assert book.store
    assert b"secret" not in (tmp_path / "journal").read_bytes()
