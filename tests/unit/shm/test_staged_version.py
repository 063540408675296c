from __future__ import annotations

import dataclasses

import pytest

from tests.support.versions import make_version
from weightsync.shm.segments import MappedSegment
from weightsync.shm.staged_version import StagedVersion


def test_a_reader_sees_what_was_staged() -> None:
    staged = StagedVersion(make_version(shards=3).manifest, ("aa", "bb", "cc"))
    segment = staged.to_segment()
    mapped = MappedSegment(segment.read_only_fd(), segment.capacity)
    again = StagedVersion.from_view(mapped.view)
    assert again == staged
    assert again.manifest.content_digest == staged.manifest.content_digest
    mapped.close()
    segment.close()


def test_a_large_document_fits() -> None:
    staged = StagedVersion(make_version(shards=1, tensors=20_000).manifest, ("aa",))
    segment = staged.to_segment()
    assert StagedVersion.from_view(segment.view) == staged
    segment.close()


@pytest.mark.parametrize("ids", [(), ("aa",), ("aa", "bb", "cc")])
def test_shards_without_a_segment_are_refused(ids: tuple[str, ...]) -> None:
    segment = StagedVersion(make_version(shards=2).manifest, ids).to_segment()
    with pytest.raises(ValueError, match="for 2 shards"):
        StagedVersion.from_view(segment.view)
    segment.close()


@pytest.mark.parametrize("at", [0, 8, 12, 16, 40])
def test_damage_is_refused(at: int) -> None:
    staged = StagedVersion(make_version(shards=1).manifest, ("aa",))
    segment = staged.to_segment()
    segment.view[at : at + 4] = b"\xff\xff\xff\xff"
    with pytest.raises(ValueError):
        StagedVersion.from_view(segment.view)
    segment.close()


def test_empty_memory_is_refused() -> None:
    with pytest.raises(ValueError):
        StagedVersion.from_view(memoryview(bytes(4096)))


def test_it_cannot_be_changed() -> None:
    staged = StagedVersion(make_version().manifest, ("aa", "bb"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        staged.segments = ()  # type: ignore[misc]
