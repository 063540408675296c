"""Small versions with real shards, for tests of stores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsync.model.digest import tensor_digest
from weightsync.model.layout import build_header, check_version
from weightsync.model.manifest import Manifest, ShardEntry
from weightsync_server.store.objects.object_keys import is_location
from weightsync_server.store.objects.shard_transfer import upload
from weightsync_server.store.store_records import CommitRecord

if TYPE_CHECKING:
    from weightsync_server.store.protocol import Store

__all__ = ["Version", "make_version", "put_shard"]


@dataclass(frozen=True)
class Version:
    """A commit record, its manifest and the bytes of its shards."""

    record: CommitRecord
    manifest: Manifest
    shards: tuple[bytes, ...]

    def write(self, store: Store) -> None:
        """Put the shards where a fetcher would."""
        for index, data in enumerate(self.shards):
            put_shard(store.shard_path(self.record.model, self.record.version, index), data)


def put_shard(target: str | None, data: bytes) -> None:
    """Put a shard where a fetcher would; None: its store keeps none."""
    if target is None:
        return
    if is_location(target):
        upload(memoryview(data), target, lambda: None)
        return
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    Path(target).write_bytes(data)


def make_version(version: int = 1, shards: int = 2, tensors: int = 3, **facts: Any) -> Version:
    """Return a version whose bytes follow from its number.

    Args:
        version: Its number.
        shards: Number of its shards.
        tensors: Tensors in each.
        **facts: Fields of the commit record to replace.
    """
    groups, entries, files, digests = [], [], [], []
    for index in range(shards):
        specs = [(f"s{index}.t{i}", "U8", (i % 7 + 1, 5)) for i in range(tensors)]
        header, places = build_header(specs, index)
        data = bytes((version + at) % 256 for at in range(places[-1].end))
        files.append(len(header).to_bytes(8, "little") + header + data)
        entries.append(ShardEntry(f"{index}", len(files[-1]), len(header)))
        groups.append(places)
        digests += [tensor_digest(data[place.begin : place.end]) for place in places]
    manifest = Manifest(check_version(entries, groups), tuple(digests))
    record = CommitRecord(
        model="m",
        version=version,
        content_digest=manifest.content_digest,
        manifest_digest=manifest.manifest_digest,
        layout_digest=manifest.layout.digest,
        epoch=1,
        commit_time_ns=1,
        metadata={"step": "ä"},
        size_bytes=manifest.layout.size,
        tensor_count=len(manifest.layout.tensors),
        shard_count=shards,
        trainer_verified=True,
        adopted=False,
    )
    return Version(replace(record, **facts), manifest, tuple(files))
