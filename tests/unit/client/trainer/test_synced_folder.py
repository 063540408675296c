"""Folders that are durable."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weightsync_client.trainer.checkpoint_files import sync_folder


def test_every_file_and_every_folder_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    files = [tmp_path / "one", tmp_path / "a/two", tmp_path / "a/b/three"]
    for file in files:
        file.write_text("x")
    (tmp_path / "link").symlink_to("/nowhere")
    synced: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
    )
    sync_folder(tmp_path)
    folders = [tmp_path, tmp_path / "a", tmp_path / "a/b"]
    assert sorted(synced) == sorted(map(str, [*files, *folders]))
