"""Where a folder may lie and what it may hold: files of its own, and no way out."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import load, save_file

from tests.support.open_files import open_files, opened_since
from weightsync.errors import Reason, WeightSyncError
from weightsync.model import checkpoint_folder as module
from weightsync_server.extensions.vllm_verbs.weight_folder import WeightFolder, open_folder

if TYPE_CHECKING:
    from collections.abc import Callable

_INDEX = "model.safetensors.index.json"


def _checkpoint(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for at, name in enumerate(names or ("model.safetensors",)):
        save_file({f"t{at}": np.full(at + 1, at, np.float32)}, folder / name)
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "import"
    made.mkdir()
    return made


def _refusal(root: Path, path: object) -> str:
    before = open_files()
    with pytest.raises(WeightSyncError) as caught:
        open_folder([root], str(path))
    assert opened_since(before) == [], "descriptors are left open"
    assert caught.value.reason in (
        Reason.REQUEST_INVALID,
        Reason.SHARD_INVALID,
        Reason.LAYOUT_INVALID,
    )
    return caught.value.message


def _opened(root: Path, path: object) -> WeightFolder:
    before = open_files()
    found = open_folder([root], str(path))
    sizes = [size for _, size, _ in found.files]
    assert sizes == [os.fstat(fd).st_size for _, _, fd in found.files]
    found.check_unchanged()
    found.close()
    assert opened_since(before) == []
    return found


def _names(root: Path, path: object) -> list[str]:
    return [name for name, _, _ in _opened(root, path).files]


def test_a_folder_at_any_depth(root: Path) -> None:
    for path in ("a", "a/b/c", "a/b/c/" + "/".join("d" * 100)):
        _checkpoint(root / path, "y.safetensors", "x.safetensors")
        found = _opened(root, root / path)
        assert [name for name, _, _ in found.files] == ["x.safetensors", "y.safetensors"]
        assert [tensor.name for tensor in found.layout.tensors] == ["t1", "t0"]
        assert found.path == str(root / path)
    assert _names(root, f"{root}//a/./b/c/") == ["x.safetensors", "y.safetensors"]


def test_each_root_counts_and_may_itself_be_a_link(root: Path, tmp_path: Path) -> None:
    _checkpoint(root / "a")
    linked = tmp_path / "linked"
    linked.symlink_to(root)
    open_folder([tmp_path / "absent", linked], f"{linked}/a").close()
    assert "does not exist" in _refusal(tmp_path / "absent", tmp_path / "absent/a")


@pytest.mark.parametrize(
    "path",
    [
        "{root}",
        "{root}/",
        "{root}/../outside",
        "{root}/a/../../outside",
        "{root}/..",
        "{root}x/a",
        "{root}/../import/a",
        "/",
        "/etc",
        "/{root}/a",
        "a",
        "./a",
        "..",
        "",
        "{root}/a\0b",
        "{root}/\ud800",
        "{root}/" + "a/" * 3000,
    ],
)
def test_a_path_that_leads_elsewhere_is_not_even_opened(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    _checkpoint(root)
    _checkpoint(root / "a")
    _checkpoint(tmp_path / "outside")
    _checkpoint(tmp_path / "importx/a")

    def never(*args: object, **more: object) -> int:
        raise AssertionError(args)

    monkeypatch.setattr(os, "open", never)
    sentence = _refusal(root, path.replace("{root}", str(root)))
    assert "weight_dir" in sentence
    assert "must be an absolute path" in sentence or "is not below" in sentence


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("absolute", [True, False])
def test_no_link_is_followed_at_any_component(
    root: Path, tmp_path: Path, depth: int, absolute: bool
) -> None:
    parts = ["a", "b", "c"]
    _checkpoint(root / "a/b/c")
    linked = root.joinpath(*parts[: depth + 1])
    # Also one that stays below the root.
    target = (root if absolute else tmp_path) / "target"
    linked.rename(target)
    linked.symlink_to(target if absolute else os.path.relpath(target, linked.parent))
    assert (root / "a/b/c/model.safetensors").exists()
    sentence = _refusal(root, root / "a/b/c")
    assert f'"{parts[depth]}" of weight_dir' in sentence
    assert "links are not followed" in sentence


def _symlink(path: Path) -> None:
    target = path.with_name("target")
    path.rename(target)
    path.symlink_to(target)


def _dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _socket(path: Path) -> None:
    path.unlink()
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("put", [_symlink, _dangling, _fifo, _socket, _directory])
@pytest.mark.parametrize("name", ["model.safetensors", _INDEX])
@pytest.mark.timeout(20)
def test_only_regular_files_are_read(root: Path, name: str, put: Callable[[Path], None]) -> None:
    folder = _checkpoint(root / "a")
    (folder / _INDEX).write_text('{"weight_map": {"t0": "model.safetensors"}}')
    assert _names(root, folder) == ["model.safetensors"]
    put(folder / name)
    assert "links are not followed" in _refusal(root, folder)


def test_a_device_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = os.open("/dev", os.O_RDONLY | os.O_DIRECTORY)
    monkeypatch.setattr(os, "open", None)
    try:
        with pytest.raises(WeightSyncError, match="not a regular file"):
            module._opened("null", devices, {}, links=False)
    finally:
        os.close(devices)


@pytest.mark.parametrize("put", [_symlink, _fifo, _directory])
def test_a_file_that_is_swapped_in_between(
    root: Path, monkeypatch: pytest.MonkeyPatch, put: Callable[[Path], None]
) -> None:
    folder = _checkpoint(root / "a")
    file = folder / "model.safetensors"
    regular = file.stat()
    put(file)
    monkeypatch.setattr(os, "stat", lambda *_, **__: regular)
    assert "links are not followed" in _refusal(root, folder)


@pytest.mark.parametrize(
    "index",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": []}',
        '{"weight_map": {"t0": 1}}',
        '{"weight_map": {"t0": ""}}',
        '{"weight_map": {"t0": ".."}}',
        '{"weight_map": {"t0": "/etc/passwd"}}',
        '{"weight_map": {"t0": "../b/model.safetensors"}}',
        '{"weight_map": {"t0": "model\\u0000.safetensors"}}',
        "[" * 100_000,
    ],
)
def test_an_index_that_is_none(root: Path, index: str) -> None:
    folder = _checkpoint(root / "a")
    _checkpoint(root / "b")
    (folder / _INDEX).write_text(index)
    assert "is not an index of safetensors files" in _refusal(root, folder)


def test_an_index_that_is_too_long(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _checkpoint(root / "a")
    (folder / _INDEX).write_text('{"weight_map": {"t0": "model.safetensors"}}' + " " * 100)
    assert _names(root, folder)
    monkeypatch.setattr(module, "MAX_INDEX_BYTES", 100)
    assert "not an index" in _refusal(root, folder)


def test_the_index_chooses_and_what_it_names_must_be_there(root: Path) -> None:
    folder = _checkpoint(root / "a", "a.safetensors", "b.safetensors", "consolidated.safetensors")
    weight_map = {"t0": "a.safetensors", "t1": "b.safetensors"}
    (folder / _INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert _names(root, folder) == ["a.safetensors", "b.safetensors"]
    (folder / _INDEX).write_text(json.dumps({"weight_map": weight_map | {"t9": "b.safetensors"}}))
    sentence = _refusal(root, folder)
    assert 'places "t9" in "b.safetensors", which does not hold it' in sentence
    (folder / _INDEX).write_text(json.dumps({"weight_map": weight_map | {"t9": "c.safetensors"}}))
    assert '"c.safetensors" does not exist' in _refusal(root, folder)
    (folder / _INDEX).write_text(json.dumps({"weight_map": weight_map | {"t9": "\ud800"}}))
    assert "is not UTF-8" in _refusal(root, folder)


def test_a_copy_that_the_index_does_not_choose_is_left_out(root: Path) -> None:
    folder = _checkpoint(root / "a", "a.safetensors", "b.safetensors")
    save_file({"t0": np.full(1, 9, np.float32), "t1": np.ones(2)}, folder / "b.safetensors")
    weight_map = {"t0": "a.safetensors", "t1": "b.safetensors"}
    (folder / _INDEX).write_text(json.dumps({"weight_map": weight_map}))
    found = open_folder([root], str(folder))
    assert [(t.shard, t.name) for t in found.layout.tensors] == [(0, "t0"), (1, "t1")]
    _, size, fd = found.files[1]
    assert load(os.pread(fd, size, 0))["t1"].tolist() == [1.0, 1.0]
    # The copy in memory stays; what it was made of must have stayed, too.
    os.utime(folder / "b.safetensors", ns=(1, 1))
    with pytest.raises(WeightSyncError, match=r'"b.safetensors" changed'):
        found.check_unchanged()
    found.close()
    (folder / _INDEX).unlink()
    assert 'twice, in "a.safetensors" and in "b.safetensors"' in _refusal(root, folder)


def test_a_folder_that_cannot_be_read_or_is_none(root: Path) -> None:
    assert "does not exist" in _refusal(root, root / "a")
    (root / "file").write_text("")
    assert "not a folder" in _refusal(root, root / "file")
    (root / "empty").mkdir()
    assert "give the folder that holds the .safetensors files" in _refusal(root, root / "empty")
    assert "File name too long" in _refusal(root, root / ("n" * 300))


def test_a_cut_file_and_one_that_changes_later(root: Path) -> None:
    folder = _checkpoint(root / "a")
    file = folder / "model.safetensors"
    found = open_folder([root], str(folder))
    os.utime(file, ns=(1, 1))
    with pytest.raises(WeightSyncError, match="changed while it was read"):
        found.check_unchanged()
    found.close()
    for size in (file.stat().st_size - 1, 20, 8, 3, 0):
        os.truncate(file, size)
        assert "model.safetensors" in _refusal(root, folder)


def test_no_root_takes_nothing(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match="start this server with --import-dir DIR"):
        open_folder([], str(_checkpoint(tmp_path / "a")))
