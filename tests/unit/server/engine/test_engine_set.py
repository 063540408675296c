"""Which sockets in a folder are engines, and what is said of the others."""

from __future__ import annotations

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

    def start(self) -> None:
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
