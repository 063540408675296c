"""The folders of optimizer states."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from weightsync_server.extensions.trainer.train_state import StateFolders
from weightsync_server.ops import durable_files

if TYPE_CHECKING:
    from weightsync_server.catalog.table import VersionTable


@dataclass
class _Record:
    version: int
    content_digest: str


class _Table:
    def __init__(self, *records: _Record) -> None:
        self.records = {record.version: record for record in records}

    def find(self, version: int) -> _Record | None:
        return self.records.get(version)

    def list(self) -> list[_Record]:
        return [*self.records.values()]


def _folders(root: Path, *records: _Record) -> tuple[StateFolders, _Table]:
    table = _Table(*records)
    return StateFolders(root, cast("VersionTable", table)), table


def _save(folders: StateFolders, version: int, text: str) -> None:
    folder = Path(f"{folders.saving}{version}")
    folder.mkdir()
    (folder / "state").write_text(text)


async def test_a_state_gets_the_name_of_its_version_and_goes_with_it(tmp_path: Path) -> None:
    folders, table = _folders(tmp_path / "states", _Record(3, "aa"), _Record(4, "bb"))
    await folders.open()
    assert folders.find(3) is None
    for version in (3, 4):
        _save(folders, version, str(version))
        folders.keep(version)
        await folders.settle()
    found = folders.find(3)
    assert found is not None
    assert (found / "state").read_text() == "3"
    # A job that is repeated saves it again.
    _save(folders, 4, "again")
    del table.records[3]
    folders.keep(4)
    await folders.settle()
    assert [path.name for path in folders.root.iterdir()] == ["4-bb"]
    assert (folders.root / "4-bb/state").read_text() == "again"


async def test_what_is_of_no_use_goes_at_the_start(tmp_path: Path) -> None:
    folders, table = _folders(tmp_path / "states", _Record(3, "aa"))
    await folders.open()
    for name in ("3-aa", "3-cc", "9-aa", "new-3", "other"):
        (folders.root / name).mkdir()
    await folders.open()
    assert [path.name for path in folders.root.iterdir()] == ["3-aa"]
    table.records.clear()
    await folders.open()
    assert not [*folders.root.iterdir()]


async def test_a_version_without_content_has_none(tmp_path: Path) -> None:
    folders, _ = _folders(tmp_path / "states", _Record(3, ""))
    await folders.open()
    _save(folders, 3, "")
    folders.keep(3)
    folders.keep(8)
    await folders.settle()
    assert folders.find(3) is None
    assert folders.find(8) is None


async def test_a_disk_that_fails_costs_the_state_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folders, _ = _folders(tmp_path / "states", _Record(3, "aa"))
    await folders.open()
    _save(folders, 3, "3")

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(durable_files, "rename", fail)
    folders.keep(3)
    await folders.settle()
    assert folders.find(3) is None
    assert "the trainer's state of version 3 is not kept" in caplog.text
