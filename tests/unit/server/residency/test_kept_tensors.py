"""What stays of a version when an update brings a part of it."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from safetensors.numpy import load, save

from tests.support.deltas import as_shard, layout_of
from tests.support.open_files import open_files, opened_since
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.manifest import Manifest
from weightsync_server.residency.adoption import kept_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from weightsync.shm.segment_socket import OfferedFile

_EMBED = np.arange(6, dtype=np.float32).reshape(2, 3)
_BASE = {"embed": _EMBED, "head": _EMBED, "norm": np.ones(3, np.float32)}
_MORE = {"bias": np.ones(3, np.float32), "w": np.full((2, 2), 7, np.float32)}


def _fd(data: bytes) -> int:
    fd = os.memfd_create("t")
    os.write(fd, data)
    return fd


@pytest.fixture
def base() -> Iterator[tuple[Manifest, list[Any]]]:
    shards = [as_shard(at, save(dict(part))) for at, part in enumerate((_BASE, _MORE))]
    segments = [SimpleNamespace(fd=_fd(shard.data)) for shard in shards]
    digests = tuple(digest for shard in shards for digest in shard.digests)
    yield Manifest(layout_of(shards), digests), segments
    for segment in segments:
        os.close(segment.fd)


def _kept(
    base: tuple[Manifest, list[Any]], tensors: Mapping[str, np.ndarray[Any, Any]]
) -> dict[str, list[Any]]:
    data = save(dict(tensors))
    update: OfferedFile = ("update", len(data), _fd(data))
    try:
        kept = kept_files([update], base[0], cast("Any", base[1])).files
    finally:
        os.close(update[2])
    found: dict[str, np.ndarray[Any, Any]] = {}
    for _, size, fd in kept:
        found |= load(os.pread(fd, size, 0))
        os.close(fd)
    return {name: tensor.tolist() for name, tensor in found.items()}


def test_all_that_does_not_come_stays(base: tuple[Manifest, list[Any]]) -> None:
    assert _kept(base, {"w": np.zeros((2, 2), np.float32)}) == {
        name: tensor.tolist() for name, tensor in {**_BASE, **_MORE}.items() if name != "w"
    }
    assert _kept(base, {**_BASE, **_MORE}) == {}


class _Counted(tuple[Any, ...]):
    """Counts how often all of it is gone through."""

    __slots__ = ()
    scans = 0

    def __iter__(self) -> Iterator[Any]:
        _Counted.scans += 1
        return super().__iter__()


def test_the_tensors_are_not_gone_through_for_each_shard() -> None:
    scans = []
    for count in (2, 20):
        shards = [as_shard(at, save({f"t{at:02}": np.ones(3, np.float32)})) for at in range(count)]
        layout = layout_of(shards)
        layout = replace(layout, tensors=_Counted(layout.tensors))
        segments = [SimpleNamespace(fd=_fd(shard.data)) for shard in shards]
        manifest = Manifest(layout, tuple(d for shard in shards for d in shard.digests))
        _Counted.scans = 0
        assert len(_kept((manifest, segments), {"t00": np.zeros(3, np.float32)})) == count - 1
        scans.append(_Counted.scans)
        for segment in segments:
            os.close(segment.fd)
    assert scans[0] == scans[1]


def test_a_tied_head_that_was_written_out_does_not_stay_as_it_was(
    base: tuple[Manifest, list[Any]],
) -> None:
    for name in ("embed", "head"):
        kept = _kept(base, {name: _EMBED + 1})
        assert kept.keys() == {"norm", "bias", "w"}
    # Of vectors many are alike by chance.
    assert "bias" in _kept(base, {"norm": np.zeros(3, np.float32)})


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"other": _EMBED}, '"other", F32 [2, 3], is not there'),
        ({"w": _EMBED}, '"w", F32 [2, 3], has F32 [2, 2] there'),
        ({"norm": np.ones(3, np.float16)}, '"norm", F16 [3], has F32 [3] there'),
    ],
)
def test_what_the_version_has_not_is_refused(
    base: tuple[Manifest, list[Any]], tensors: Any, sentence: str
) -> None:
    before = open_files()
    with pytest.raises(WeightSyncError) as caught:
        _kept(base, tensors)
    assert caught.value.reason is Reason.ENGINE_REFUSED
    assert sentence in caught.value.message
    assert caught.value.message.startswith(
        "send all tensors, or send these exactly as in the version"
    )
    assert opened_since(before) == []
