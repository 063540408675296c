"""Which sockets in a folder are engines, and what is said of the others."""

from __future__ import annotations

import asyncio
import os
import stat
from typing import TYPE_CHECKING, Any

import pytest

from weightsync_server.engine import EngineSet, JournalFile

if TYPE_CHECKING:
    from pathlib import Path


class _Applier:
    """As much of what applies versions as is asked of it here."""

    def __init__(self, socket: Path) -> None:
        self.name = socket.name.removesuffix(".sock")
        self.supervisor = self
        self.loaded = ""

    def start(self) -> None:
        pass

    async def leave(self) -> None:
        pass


def _make(socket: Path) -> Any:
    return _Applier(socket)


async def test_a_socket_with_no_name_for_an_engine_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "engines"
    folder.mkdir()
    for name in ("a.sock", "copy of a.sock", "ours.sock"):
        os.mknod(folder / name, stat.S_IFSOCK | 0o600)
    journal = JournalFile(tmp_path / "journal")
    known = EngineSet(journal, folder, _make, own=frozenset({folder / "ours.sock"}))
    for _ in range(2):
        await known._look()
    assert [one.name for one in known.appliers] == ["a"]
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "copy of a.sock" in warning
    assert "name it with" in warning
    (folder / "copy of a.sock").unlink()
    await known._look()
    os.mknod(folder / "copy of a.sock", stat.S_IFSOCK | 0o600)
    await known._look()
    assert len(caplog.records) == 2
    journal.close()


def _supervisors(known: EngineSet) -> list[Any]:
    return [one.supervisor for one in known.appliers]


def _loaded(known: EngineSet) -> Any:
    return known.loaded


async def test_what_engines_have_loaded_is_known_when_one_has_left_and_not_before_all_told(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "engines"
    folder.mkdir()
    for name in ("a.sock", "b.sock"):
        os.mknod(folder / name, stat.S_IFSOCK | 0o600)
    journal = JournalFile(tmp_path / "journal")
    known = EngineSet(journal, folder, _make)
    await known._look()
    first, second = _supervisors(known)
    first.loaded = "/made/first"
    assert _loaded(known) is None
    second.loaded = "/made/second"
    assert _loaded(known) == {"/made/first", "/made/second"}
    # It restarts, and will load the same again.
    (folder / "b.sock").unlink()
    await known._look()
    await asyncio.gather(*known._leaving.values())
    assert _loaded(known) == {"/made/first", "/made/second"}
    os.mknod(folder / "b.sock", stat.S_IFSOCK | 0o600)
    await known._look()
    assert _loaded(known) == {"/made/first", "/made/second"}
    _supervisors(known)[1].loaded = "/made/third"
    assert _loaded(known) == {"/made/first", "/made/third"}
    journal.close()
