"""What a folder is taken for by all who read one: nothing else than its index says."""

from __future__ import annotations

import errno
import json
import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import load, save_file

from tests.support.open_files import open_files, opened_since
from weightsync import process_limits
from weightsync.errors import Reason, WeightSyncError
from weightsync.model import checkpoint_folder as module
from weightsync.model import layout
from weightsync.model.checkpoint_folder import (
    INDEX,
    CheckpointFolder,
    in_memory,
    open_checkpoint,
    packed,
    read_index,
    read_layout,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def _write(folder: Path, index: object, **files: Mapping[str, float]) -> Path:
    for name, tensors in files.items():
        arrays = {tensor: np.full(3, value, np.float32) for tensor, value in tensors.items()}
        save_file(arrays, folder / f"{name}.safetensors")
    if index is not None:
        document = {"metadata": {"total_size": 1}, "weight_map": index}
        text = index if isinstance(index, str) else json.dumps(document)
        (folder / INDEX).write_text(text)
    return folder


def _map(**places: str) -> dict[str, str]:
    return {tensor: f"{name}.safetensors" for tensor, name in places.items()}


def _open(
    folder: Path, *, links: bool = True, names: Sequence[str] | None = None
) -> CheckpointFolder:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    before = open_files()
    try:
        return open_checkpoint(fd, links=links, names=names)
    except WeightSyncError:
        assert opened_since(before) == [], "descriptors are left open"
        raise
    finally:
        os.close(fd)


def _refusal(folder: Path, *, links: bool = True) -> str:
    with pytest.raises(WeightSyncError) as caught:
        _open(folder, links=links).chosen()
    assert caught.value.reason in (Reason.REQUEST_INVALID, Reason.LAYOUT_INVALID)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 1000
    return caught.value.message


def _chosen(folder: Path) -> dict[str, list[str]]:
    found = _open(folder)
    try:
        pairs = zip(found.files, found.chosen(), strict=True)
        return {file.name: [tensor.name for tensor in tensors] for file, tensors in pairs}
    finally:
        found.close()


def test_the_index_says_which_files_count(tmp_path: Path) -> None:
    _write(tmp_path, _map(x="a", y="b"), a={"x": 1}, b={"y": 2}, other={"x": 3, "y": 4})
    assert _chosen(tmp_path) == {"a.safetensors": ["x"], "b.safetensors": ["y"]}
    (tmp_path / INDEX).unlink()
    (tmp_path / "other.safetensors").unlink()
    assert _chosen(tmp_path) == {"a.safetensors": ["x"], "b.safetensors": ["y"]}


def test_what_an_index_tells_and_its_file_lacks_is_refused_with_both_files(tmp_path: Path) -> None:
    _write(tmp_path, _map(x="a", y="b", z="b"), a={"x": 1, "z": 3}, b={"y": 2})
    assert _refusal(tmp_path) == (
        f'give the folder once it is completely written: {INDEX} places "z" in "b.safetensors", '
        'but it is in "a.safetensors"'
    )
    _write(tmp_path, _map(x="a", y="b", gone="b"))
    assert 'places "gone" in "b.safetensors", which does not hold it' in _refusal(tmp_path)
    _write(tmp_path, _map(x="a", y="c"))
    assert _refusal(tmp_path) == (
        f'"c.safetensors" does not exist here, which {INDEX} names for "y"; give the folder once '
        "it is completely written"
    )


def test_a_second_copy_is_settled_by_the_index_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _write(tmp_path, _map(x="a", y="b"), a={"x": 1}, b={"x": 9, "y": 2, "z": 3})
    found = _open(tmp_path)
    # What no index names and one file alone holds belongs to the checkpoint, as for vLLM.
    taken = found.chosen()
    assert [[t.name for t in tensors] for tensors in taken] == [["x"], ["y", "z"]]
    assert found.holders["x"] == ("a.safetensors", "b.safetensors")
    (record,) = caplog.records
    for part in ('"x"', 'in "a.safetensors" and in "b.safetensors"', "taken from", INDEX):
        assert part in record.message
    fd = packed(found.files[1], taken[1], "b")
    with os.fdopen(fd, "rb") as copy:
        copy.seek(0)
        tensors = load(copy.read())
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        "y": [2.0] * 3,
        "z": [3.0] * 3,
    }
    found.close()


@pytest.mark.parametrize("index", [None, _map(y="b", v="a"), _map(x="c", y="b", v="a", w="c")])
def test_copies_that_no_index_settles_are_refused_by_both_names(
    tmp_path: Path, index: dict[str, str] | None
) -> None:
    _write(tmp_path, index, a={"x": 1, "v": 1}, b={"x": 1, "y": 2}, c={"w": 1})
    told = _refusal(tmp_path)
    assert '"a.safetensors" and in "b.safetensors"' in told
    assert '"x"' in told
    if index is None:
        fds = [os.open(tmp_path / f"{name}.safetensors", os.O_RDONLY) for name in "abc"]
        files = [
            (f"{n}.safetensors", os.fstat(fd).st_size, fd) for n, fd in zip("abc", fds, strict=True)
        ]
        with pytest.raises(WeightSyncError, match=r'in "a.safetensors" and in "b.safetensors"'):
            read_layout(files)
        for fd in fds:
            os.close(fd)


@pytest.mark.parametrize(
    ("index", "why"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"weight_map": {"x": NaN', "not JSON"),
        ("\udcff", "not JSON"),
        ("[]", "no weight_map"),
        ("7", "no weight_map"),
        ("{}", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": ["a.safetensors"]}', "no weight_map"),
        ('{"weight_map": {"x": 1}}', "not a file in its folder"),
        ('{"weight_map": {"x": null}}', "not a file in its folder"),
        ('{"weight_map": {"x": ["a.safetensors"]}}', "not a file in its folder"),
        (_map(x="/etc/passwd"), '"/etc/passwd.safetensors" for "x"'),
        (_map(x="../a"), '"../a.safetensors" for "x"'),
        (_map(x="sub/a"), '"sub/a.safetensors" for "x"'),
        ('{"weight_map": {"x": ".."}}', '".." for "x"'),
        ('{"weight_map": {"x": "a\\u0000.safetensors"}}', "not a file in its folder"),
        ('{"weight_map": {"x": "a.safetensors", "x": "b.safetensors"}}', 'lists "x" twice'),
        (_map(x="n" * 5000), "File name too long"),
        (_map(x="\ud800"), "UTF-8"),
    ],
)
def test_an_index_that_is_none_is_one_sentence(tmp_path: Path, index: object, why: str) -> None:
    _write(tmp_path, None, a={"x": 1}, b={"x": 2})
    text = index if isinstance(index, str) else json.dumps({"weight_map": index})
    (tmp_path / INDEX).write_bytes(text.encode(errors="surrogateescape"))
    for links in (True, False):
        assert why in _refusal(tmp_path, links=links)


def test_an_index_is_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, _map(x="a"), a={"x": 1})
    assert _chosen(tmp_path) == {"a.safetensors": ["x"]}
    monkeypatch.setattr(module, "MAX_INDEX_BYTES", 50)
    assert "it has more than 50 bytes; write it again" in _refusal(tmp_path)


def test_links_are_followed_only_where_they_may_be(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    folder.mkdir()
    _write(blobs, _map(x="a"), a={"x": 1})
    # As a hub's cache has them.
    for name in ("a.safetensors", INDEX):
        (folder / name).symlink_to(f"../blobs/{name}")
    assert _chosen(folder) == {"a.safetensors": ["x"]}
    assert "links are not followed" in _refusal(folder, links=False)
    (folder / INDEX).unlink()
    assert '"a.safetensors" is a link' in _refusal(folder, links=False)
    (blobs / "a.safetensors").unlink()
    assert '"a.safetensors" does not exist here' in _refusal(folder)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["a.safetensors", INDEX])
@pytest.mark.parametrize("links", [True, False])
def test_a_fifo_holds_nobody_up(tmp_path: Path, name: str, *, links: bool) -> None:
    _write(tmp_path, _map(x="a"), a={"x": 1})
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    assert "not a regular file" in _refusal(tmp_path, links=links)


def test_a_system_that_fails_is_not_the_callers_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path, None, a={"x": 1})

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    monkeypatch.setattr(os, "open", full)
    with pytest.raises(OSError, match="Too many open files"):
        open_checkpoint(fd)
    os.close(fd)


def test_a_checkpoint_may_have_more_files_than_a_process_has_descriptors(tmp_path: Path) -> None:
    _write(tmp_path, None, **{f"f{at:03}": {f"t{at:03}": 1} for at in range(64)})
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (folder + 8, limits[1]))
    try:
        found = open_checkpoint(folder, keep_open=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(folder)
    assert len(found.files) == 64
    assert {file.fd for file in found.files} == {-1}


def test_too_many_tensors_end_the_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, None, a={"x": 1, "y": 1}, b={"z": 1}, c={"w": 1})
    monkeypatch.setattr(layout, "MAX_TENSORS", 2)
    assert "at most 2" in _refusal(tmp_path)
    # Parts of a tensor count once: a rank writes its own into a file of its own.
    monkeypatch.setattr(layout, "MAX_TENSORS", 4)
    _write(tmp_path, None, d={"x": 1, "y": 1, "z": 1})
    _open(tmp_path).close()


def test_an_index_of_another_name(tmp_path: Path) -> None:
    other = "consolidated.safetensors.index.json"
    (tmp_path / other).write_text(json.dumps({"weight_map": _map(x="a")}))
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    assert (read_index(fd), read_index(fd, other)) == ({}, _map(x="a"))
    (tmp_path / other).write_text("{")
    with pytest.raises(WeightSyncError, match=r"consolidated.*is not an index"):
        read_index(fd, other)
    os.close(fd)


def test_what_does_not_fit_into_memory_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path, _map(x="a", y="b"), a={"x": 1}, b={"x": 9, "y": 2})
    found = _open(tmp_path)
    # Of the cgroup: the host has more.
    monkeypatch.setattr(process_limits, "_cgroup_free", lambda _: 11)
    with pytest.raises(
        WeightSyncError, match=r"b takes 12 bytes of memory.*free as much"
    ) as caught:
        packed(found.files[1], found.chosen()[1], "b")
    assert caught.value.reason is Reason.MEMORY_EXHAUSTED
    found.close()


@pytest.mark.parametrize(
    ("limit", "value", "remedy"),
    [
        (resource.RLIMIT_FSIZE, 4096, "raise the file size limit"),
        (resource.RLIMIT_NOFILE, 3, "raise the limit on open files"),
    ],
)
def test_a_copy_that_a_limit_forbids_names_that_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, value: int, remedy: str
) -> None:
    # It reads a file for that.
    monkeypatch.setattr(module, "available_bytes", lambda: 1 << 40)
    source = tmp_path / "f"
    source.write_bytes(bytes(1 << 20))
    fd = os.open(source, os.O_RDONLY)
    before, (soft, most) = open_files(), resource.getrlimit(limit)
    resource.setrlimit(limit, (value, most))
    try:
        with pytest.raises(WeightSyncError) as caught:
            os.close(in_memory(b"{}      ", fd, [(0, 1 << 20)], "a checkpoint"))
    finally:
        resource.setrlimit(limit, (soft, most))
    assert opened_since(before) == []
    os.close(fd)
    assert caught.value.reason is Reason.MEMORY_EXHAUSTED
    assert remedy in caught.value.message
