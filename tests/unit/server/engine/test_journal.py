from __future__ import annotations

import errno
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.support.open_files import open_files, opened_since
from weightsync_server.engine import journal as module
from weightsync_server.engine.journal import HOST, Entry, Journal, JournalFile, live_in_store
from weightsync_server.ops import durable_files

if TYPE_CHECKING:
    from pathlib import Path


def _intent(version: int, previous: int = 0) -> Entry:
    return Entry("INTENT", f"apply-{version}", version, previous)


def _done(version: int, previous: int = 0) -> Entry:
    return Entry("DONE", f"apply-{version}", version, previous)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def _write(path: Path, *entries: Entry) -> None:
    journal = JournalFile(path)
    for entry in entries:
        journal.write(entry)
    journal.close()


def _seen(path: Path) -> tuple[Entry | None, tuple[int, int]]:
    journal = JournalFile(path)
    journal.close()
    return Journal(journal).last, Journal(journal).live


def test_nothing_yet(path: Path) -> None:
    assert _seen(path) == (None, (0, 0))


def test_the_last_done_is_live_whatever_was_intended_since(path: Path) -> None:
    _write(path, _intent(1), _done(1), _intent(2, 1), _done(2, 1), _intent(3, 2))
    assert _seen(path) == (_intent(3, 2), (2, 1))
    assert _seen(path) == (_intent(3, 2), (2, 1)), "opening it changes nothing"


def test_torn_at_every_byte(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A thousand of them take long, and no power fails here.
    monkeypatch.setattr(os, "fsync", lambda _: None)
    entries = [_intent(1), _done(1), _intent(2, 1), _done(2, 1)]
    _write(path, *entries)
    whole = path.read_bytes()
    ends = [end + 1 for end, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        good = sum(end <= size for end in ends)
        journal = JournalFile(path)
        assert Journal(journal).last == (entries[good - 1] if good else None), size
        assert Journal(journal).live == {0: (0, 0), 1: (0, 0), 4: (2, 1)}.get(good, (1, 0)), size
        # What is written from now on is found again.
        journal.write(_done(9, 8))
        journal.close()
        assert _seen(path) == (_done(9, 8), (9, 8)), size


@pytest.mark.parametrize(
    "tail",
    [
        b"\0" * 4096,
        b"\xff\xfe garbage\n",
        b"\n\n\n",
        b"0123456789abcdef {}\n",
        os.urandom(1000),
        b'ef46db3751d8e999 \n{"event": "DONE"}\n',
    ],
)
def test_a_garbage_tail_is_cut_off(path: Path, tail: bytes) -> None:
    _write(path, _done(1))
    with path.open("ab") as file:
        file.write(tail)
    journal = JournalFile(path)
    assert Journal(journal).live == (1, 0)
    journal.write(_intent(2, 1))
    journal.close()
    assert _seen(path) == (_intent(2, 1), (1, 0))


def test_a_flipped_bit_ends_what_is_believed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    _write(path, _done(1), _done(2, 1))
    data = bytearray(path.read_bytes())
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        assert _seen(path)[1] in ((0, 0), (1, 0)), at


def test_it_starts_anew_when_it_has_grown(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROTATE_BYTES", 1000)
    journal = JournalFile(path)
    for version in range(1, 200):
        journal.write(_intent(version, version - 1))
        journal.write(_done(version, version - 1))
        assert path.stat().st_size < 1300
        assert len(journal._entries) < 20
    journal.write(_intent(200, 199))
    journal.close()
    assert _seen(path) == (_intent(200, 199), (199, 198))


@pytest.mark.parametrize("step", ["create", "rename", "fsync"])
def test_a_crash_while_it_starts_anew(
    path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    _write(path, _done(1), _intent(2, 1))
    monkeypatch.setattr(module, "_ROTATE_BYTES", 10)
    journal = JournalFile(path)

    def crash(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(durable_files, step, crash)
        with pytest.raises(OSError, match="No space"):
            journal.write(_done(2, 1))
    assert _seen(path) == (_intent(2, 1), (1, 0)), "the record did not count"
    # Its descriptor is still its own, and once there is room it goes on.
    os.fstat(journal._fd)
    journal.write(_done(2, 1))
    journal.close()
    assert _seen(path) == (_done(2, 1), (2, 1))
    assert not path.with_suffix(".new").exists()


def test_a_leftover_of_a_crash_is_overwritten(path: Path) -> None:
    _write(path, _done(1))
    path.with_suffix(".new").write_bytes(b"half a")
    assert _seen(path) == (_done(1), (1, 0))
    assert not path.with_suffix(".new").exists()


@pytest.mark.parametrize("kept", [0, 1, 30])
def test_a_full_disk_never_counts_half_a_record(
    path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    journal = JournalFile(path)
    journal.write(_done(1))

    def short(fd: int, data: bytes) -> None:
        os.write(fd, data[:kept])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(durable_files, "write", short)
        with pytest.raises(OSError, match="No space"):
            journal.write(_intent(2, 1))
    assert Journal(journal).last == _done(1)
    journal.write(_intent(3, 1))
    journal.close()
    assert _seen(path) == (_intent(3, 1), (1, 0))


def test_a_failed_fsync_is_no_record(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = JournalFile(path)
    journal.write(_done(1))

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output"):
            journal.write(_intent(2, 1))
    assert Journal(journal).last == _done(1)
    journal.write(_done(3, 1))
    journal.close()
    assert _seen(path)[0] == _done(3, 1)
    assert b"apply-2" not in path.read_bytes()


def test_it_leaves_no_descriptor(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROTATE_BYTES", 100)
    before = open_files()
    _write(path, *(_done(version) for version in range(1, 30)))
    assert opened_since(before) == []


@pytest.mark.parametrize("step", ["write", "fsync", "rename", "flush_directory", "append"])
def test_a_record_after_a_rotation_that_failed_is_found(
    path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    journal = JournalFile(path)
    journal.write(_done(1))
    monkeypatch.setattr(module, "_ROTATE_BYTES", 0)
    with monkeypatch.context() as patch:
        patch.setattr(durable_files, step, refuse)
        with pytest.raises(OSError, match="Input/output"):
            journal.write(_done(2, 1))
    monkeypatch.undo()
    # What is appended goes to the file that has the name now.
    journal.write(_done(3, 1))
    journal.close()
    assert _seen(path) == (_done(3, 1), (3, 1))


def test_what_one_engine_came_to_since_is_not_looked_for_as_what_all_had(path: Path) -> None:
    store = "file:///store"
    digest = JournalFile(path.with_name("other"), store).store
    for_all = Entry("DONE", "a", 5, 4, store=digest, engine=HOST)
    since = Entry("DONE", "b", 3, 5, store=digest, engine="one")
    journal = JournalFile(path, store)
    for entry in (for_all, since, Entry("INTENT", "c", 6, 3, engine=HOST, bases={"one": 3})):
        journal.write(entry)
    # The intent says nothing of what lies in the store, and nobody serves version 5 any more.
    assert live_in_store(journal) == frozenset()
    journal.write(replace(since, apply_id="d"))
    assert live_in_store(journal) == {3}
    journal.close()


def test_what_all_engines_did_together_is_in_the_store(path: Path) -> None:
    store = "file:///store"
    journal = JournalFile(path, store)
    journal.write(Entry("DONE", "a", 5, 4, store=journal.store, engine=HOST))
    assert live_in_store(journal) == {5}
    journal.close()


def test_a_decision_for_all_outlasts_what_some_begin_when_it_starts_anew(path: Path) -> None:
    done = Entry("DONE", "a", 5, 4, engine=HOST)
    decided = Entry("COMMIT", "b", 3, 5, engine=HOST)
    begun = Entry("INTENT", "c", 6, 3, engine=HOST, bases={"one": 3})
    _write(path, done, decided, begun)
    journal = JournalFile(path)
    assert Journal(journal, "two").last == decided
    assert Journal(journal, "two").decided == 3
    assert Journal(journal, "one").last == begun
    journal.close()
