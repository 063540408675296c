"""Folders that a new vLLM loads."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from weightsync.errors import Reason
from weightsync_client import ClientError
from weightsync_client.errors import refuse
from weightsync_client.trainer.checkpoint_files import (
    MARK,
    FolderOwner,
    mark_folder,
    write_checkpoint,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class _Client:
    """Pulls a version."""

    error: ClientError | None = None

    def pull(self, path: Path, version: int, *, on_progress: Callable[[int, int], None]) -> None:
        path.mkdir()
        on_progress(1, 2)
        (path / "model.safetensors").write_text(f"weights of {version}")
        if self.error:
            raise self.error


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "sub").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "merges.txt", "chat_template.jinja"):
        (folder / name).write_text(name)
    for name in ("model-1.safetensors", "model.safetensors.index.json", "pytorch_model.bin"):
        (folder / name).write_text("old weights")
    return folder


def _write(
    checkpoint: str,
    target: Path,
    client: Any = None,
    owner: FolderOwner = FolderOwner("one", 2),  # noqa: B008 - it never changes
    stop: threading.Event | None = None,
    others: Sequence[str] = (),
    **config: Any,
) -> str:
    attached: Any = SimpleNamespace(checkpoint=checkpoint, config=config)
    pulls: Any = client or _Client()
    stop = stop or threading.Event()
    return write_checkpoint(pulls, attached, 7, target, owner, stop, others)


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_it_has_the_weights_and_what_came_beside_the_old_ones(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "made/below/here"
    assert _write(str(source), target) == ""
    assert {path.name for path in target.iterdir()} == {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "merges.txt",
        "chat_template.jinja",
        MARK,
    }
    assert (target / "model.safetensors").read_text() == "weights of 7"
    assert [path.name for path in target.parent.iterdir()] == ["here"]


def test_without_files_it_has_the_configuration(tmp_path: Path) -> None:
    missing = _write("no such/model", tmp_path / "x", hidden_size=4)
    assert json.loads((tmp_path / "x/config.json").read_text()) == {"hidden_size": 4}
    assert missing.startswith(
        "copy tokenizer into the folder before a vLLM loads it: none was found"
    )


def test_what_a_vllm_would_miss_is_named(source: Path, tmp_path: Path) -> None:
    missing = _write("memory", tmp_path / "x")
    assert missing.startswith(
        "copy config.json and tokenizer into the folder before a vLLM loads it: none was found"
    )
    assert "beside the engine's checkpoint memory" in missing
    (source / "config.json").unlink()
    assert "copy config.json into" in _write(str(source), tmp_path / "y")


def test_one_that_is_there_stays_as_it_is(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.mkdir()
    with pytest.raises(ClientError, match="already exists"):
        _write(str(source), target)
    assert not [*target.iterdir()]
    assert {path.name for path in tmp_path.iterdir()} == {"source", "x"}


def test_what_fails_leaves_nothing(source: Path, tmp_path: Path) -> None:
    client = _Client()
    client.error = refuse(Reason.VERSION_UNKNOWN, "it has exited")
    with pytest.raises(ClientError, match="it has exited"):
        _write(str(source), tmp_path / "x", client)
    assert {path.name for path in tmp_path.iterdir()} == {"source"}
    # What a process that died has left is in nobody's way: it had not begun, or had.
    (tmp_path / ".x.new").mkdir()
    half = tmp_path / ".y.new"
    (half / "weights").mkdir(parents=True)
    mark_folder(half, tmp_path / "y", FolderOwner("one", 2))
    _write(str(source), tmp_path / "x")
    assert {path.name for path in tmp_path.iterdir()} == {"source", "x"}


def test_a_caller_that_leaves_ends_it(source: Path, tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(ClientError, match="request the checkpoint again") as caught:
        _write(str(source), tmp_path / "x", stop=stop)
    assert caught.value.reason is Reason.CANCELLED
    assert _names(tmp_path) == {"source"}


def test_of_its_own_folders_the_oldest_goes(source: Path, tmp_path: Path) -> None:
    root = tmp_path / "made"
    for name in ("c", "a", "b"):
        _write(str(source), root / name)
    assert _names(root) == {"a", "b"}
    _write(str(source), root / "d", owner=FolderOwner("one", 0))
    assert _names(root) == {"a", "b", "d"}
    # What another server has made counts for that one alone.
    _write(str(source), root / "e", owner=FolderOwner("two", 1))
    assert _names(root) == {"a", "b", "d", "e"}
    _write(str(source), root / "f", owner=FolderOwner("one", 1))
    assert _names(root) == {"e", "f"}


def _unmarked(folder: Path) -> None:
    (folder / MARK).unlink()


def _added_to(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")


def _added_a_folder(folder: Path) -> None:
    (folder / "sub").mkdir()


def _changed(folder: Path) -> None:
    (folder / "config.json").write_text("better")


def _removed_from(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def _replaced_by_a_link(folder: Path) -> None:
    file = folder / "merges.txt"
    file.unlink()
    file.symlink_to(folder / "config.json")


def _copied(folder: Path) -> None:
    shutil.copytree(folder, folder.with_name("copy"))
    shutil.rmtree(folder)
    folder.with_name("copy").rename(folder)


def _renamed(folder: Path) -> None:
    folder.rename(folder.with_name("mine"))


def _linked(folder: Path) -> None:
    elsewhere = folder.parents[1] / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)


def _nonsense(folder: Path) -> None:
    (folder / MARK).write_text("[" * 100_000)


def _of_many_kinds(folder: Path) -> None:
    (folder / MARK).write_text('{"made_ns": "x", "owner": ["one"], "name": 3}')


def _a_pipe(folder: Path) -> None:
    (folder / MARK).unlink()
    os.mkfifo(folder / MARK)


@pytest.mark.parametrize(
    "change",
    [
        *(_unmarked, _added_to, _added_a_folder, _changed, _removed_from, _replaced_by_a_link),
        *(_copied, _renamed, _linked, _nonsense, _of_many_kinds, _a_pipe),
    ],
    ids=lambda change: change.__name__,
)
def test_what_is_not_as_it_was_made_stays(
    source: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    root = tmp_path / "made"
    _write(str(source), root / "old")
    change(root / "old")
    before = _names(root)
    for name in ("a", "b", "c"):
        _write(str(source), root / name)
    assert _names(root) == before | {"b", "c"}


def test_what_an_engine_has_loaded_stays(source: Path, tmp_path: Path) -> None:
    root = tmp_path / "made"
    _write(str(source), root / "loaded")
    (tmp_path / "link").symlink_to(root / "loaded")
    for name in ("a", "b", "c"):
        _write(str(tmp_path / "link"), root / name)
    assert _names(root) == {"loaded", "b", "c"}
    # It takes nobody's place, however new it is.
    _write(str(source), root / "d", owner=FolderOwner("one", 0))
    _write(str(root / "d"), root / "e")
    assert _names(root) == {"c", "d", "e"}


def test_what_other_engines_of_the_host_have_loaded_stays(source: Path, tmp_path: Path) -> None:
    root = tmp_path / "made"
    _write(str(source), root / "second")
    _write(str(source), root / "third")
    others = [str(root / "second"), str(root / "third"), "an/other-model"]
    for name in ("a", "b", "c"):
        _write(str(source), root / name, others=others)
    assert _names(root) == {"second", "third", "b", "c"}


def test_a_removal_that_was_cut_short_is_ended_by_the_next(source: Path, tmp_path: Path) -> None:
    root = tmp_path / "made"
    _write(str(source), root / "old")
    (root / "old").rename(root / ".old.new")
    (root / ".old.new" / "model.safetensors").unlink()
    _write(str(source), root / "a")
    assert _names(root) == {"a"}


def test_a_folder_of_somebody_else_is_in_the_way(source: Path, tmp_path: Path) -> None:
    theirs = tmp_path / ".x.new"
    theirs.mkdir()
    (theirs / "file").write_text("theirs")
    with pytest.raises(ClientError, match=r"remove .*\.x\.new, which this server did not create"):
        _write(str(source), tmp_path / "x")
    assert (theirs / "file").read_text() == "theirs"


def test_a_folder_that_cannot_be_written_is_named(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ClientError, match=r"cannot be written.*; name another folder"):
        _write(str(source), tmp_path / "file/x")


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EACCES, "let the server's user write there"),
        (errno.EROFS, "let the server's user write there"),
        (errno.ENOSPC, "free space there"),
        (errno.EDQUOT, "free space there"),
        (errno.EFBIG, "use another file system|raise the file size limit"),
    ],
)
def test_the_remedy_is_that_of_the_error(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("weightsync_client.trainer.checkpoint_files.sync_folder", fail)
    with pytest.raises(ClientError, match=rf"cannot be written.*; ({remedy})") as caught:
        _write(str(source), tmp_path / "x")
    assert ("space" in caught.value.message.partition(";")[2]) is remedy.startswith("free")
    assert _names(tmp_path) == {"source"}


class _Large(_Client):
    def pull(self, path: Path, version: int, *, on_progress: Callable[[int, int], None]) -> None:
        super().pull(path, version, on_progress=on_progress)
        (path / "large.safetensors").write_bytes(bytes(_LIMIT + 1))


_LIMIT = 1 << 20


def test_a_limit_on_files_is_told_in_bytes(source: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_LIMIT, before[1]))
    try:
        with pytest.raises(ClientError, match=f"may write {_LIMIT} bytes per file") as caught:
            _write(str(source), tmp_path / "x", _Large())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.reason is Reason.DISK_EXHAUSTED
    assert _names(tmp_path) == {"source"}
