from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

import pytest

from tests.support.versions import make_version
from weightsync.shm.segment_socket import SegmentServer
from weightsync.shm.segments import MappedSegment
from weightsync.shm.staged_version import StagedDocuments, StagedVersion, read_document

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from weightsync.model.manifest import Manifest


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


@pytest.mark.parametrize("at", [0, 8, 40, 44, 52, 60, 68, 80])
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


@pytest.fixture
def published(tmp_path: Path) -> Iterator[Callable[[StagedVersion], str]]:
    """Give what publishes a document and returns its id."""
    with contextlib.ExitStack() as ended:
        server = SegmentServer(tmp_path / "segments.sock")
        ended.callback(server.close)

        def publish(staged: StagedVersion) -> str:
            segment = staged.to_segment()
            ended.callback(segment.close)
            server.publish(segment.id, segment.read_only_fd(), segment.capacity)
            return segment.id

        yield publish


def _other(manifest: Manifest) -> Manifest:
    """Return the manifest of the same tensors with other bytes."""
    return dataclasses.replace(manifest, digests=manifest.digests[::-1])


def test_a_document_and_a_layout_are_read_once(
    published: Callable[[StagedVersion], str], tmp_path: Path
) -> None:
    path = str(tmp_path / "segments.sock")
    first = StagedVersion(make_version().manifest, ("aa", "bb"))
    second = StagedVersion(_other(first.manifest), ("cc", "dd"))
    third = StagedVersion(make_version(tensors=4).manifest, ("ee", "ff"))
    documents = StagedDocuments()
    ids = [published(staged) for staged in (first, second, third)]
    read = [documents.read(path, name) for name in ids]
    assert read == [first, second, third]
    assert read[0].manifest.content_digest != read[1].manifest.content_digest
    assert read[0].manifest.layout is read[1].manifest.layout
    assert read[0].manifest.layout is not read[2].manifest.layout
    (tmp_path / "segments.sock").unlink()
    assert documents.read(path, ids[0]) is read[0]


def test_few_documents_are_kept(published: Callable[[StagedVersion], str], tmp_path: Path) -> None:
    path = str(tmp_path / "segments.sock")
    staged = StagedVersion(make_version().manifest, ("aa", "bb"))
    documents = StagedDocuments()
    ids = [published(staged) for _ in range(5)]
    for name in ids:
        documents.read(path, name)
    (tmp_path / "segments.sock").unlink()
    assert documents.read(path, ids[1]) == staged
    with pytest.raises(OSError):
        documents.read(path, ids[0])


def test_a_document_that_is_not_there_is_told(
    published: Callable[[StagedVersion], str], tmp_path: Path
) -> None:
    published(StagedVersion(make_version().manifest, ("aa", "bb")))
    with pytest.raises(LookupError):
        read_document(str(tmp_path / "segments.sock"), "none")
