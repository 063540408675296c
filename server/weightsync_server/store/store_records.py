"""What a store writes of versions and open pushes, in small files that survive a crash."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import xxhash

from weightsync_server.ops import durable_files

if TYPE_CHECKING:
    from weightsync.model.manifest import ShardEntry, TensorEntry


#: What a JSON document holds of a field, by its annotation.
_KINDS = {"Mapping[str, str]": dict, "bool": bool, "float": float, "int": int, "str": str}


@dataclass(frozen=True)
class _Record:
    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Read what `to_json` returned; ValueError: a field is missing or of another type."""
        values: dict[str, Any] = {}
        for field in fields(cls):
            # Records of earlier releases lack what has a default.
            default = None if field.default is MISSING else field.default
            values[field.name] = document.get(field.name, default)
            if type(values[field.name]) is not _KINDS[str(field.type)]:
                raise ValueError(f"{field.name} is {values[field.name]!r}")
        return cls(**values)


@dataclass(frozen=True)
class CommitRecord(_Record):
    """What makes a version exist.

    Attributes:
        trainer_verified: The digests equal those that the trainer sent.
        adopted: It is an engine's checkpoint and no push.
        push_id, idempotency_key: Of the push that brought it; empty: none.
        base_version: The version whose bytes it is kept as a change of; 0: it is kept in full.
        delta_bytes: Sum of the sizes of the delta shards that are kept of it.
        changed_elements: Where it was pushed as a delta: elements that the delta told.
        client_run: The run of the client that pushed it; empty: not known.
        epoch_taken: That run took the epoch.
        traceparent: The span of the push that brought it; empty: it was not traced.
        probes: What its gate scores, see `catalog.kept_probes`; empty: it came with none.
    """

    model: str
    version: int
    content_digest: str
    manifest_digest: str
    layout_digest: str
    epoch: int
    commit_time_ns: int
    metadata: Mapping[str, str]
    size_bytes: int
    tensor_count: int
    shard_count: int
    trainer_verified: bool
    adopted: bool
    push_id: str = ""
    idempotency_key: str = ""
    base_version: int = 0
    base_content_digest: str = ""
    delta_bytes: int = 0
    changed_elements: int = 0
    changed_fraction: float = 0.0
    client_run: str = ""
    epoch_taken: bool = False
    traceparent: str = ""
    probes: str = ""

    @property
    def stored_bytes(self) -> int:
        return self.delta_bytes if self.base_version else self.size_bytes


@dataclass(frozen=True)
class DeltaFacts:
    changed_elements: int
    changed_fraction: float
    base_version: int = 0
    base_content_digest: str = ""
    delta_bytes: int = 0


@dataclass(frozen=True)
class PushRecord(_Record):
    """What must be known of an open push after a crash.

    `request` is the serialized call that opened it, hexadecimal. `delta` tells that its shards are
    those of a delta. `server` has the push; empty: an earlier release. `traceparent` is the span of
    the push; empty: it is not traced.
    """

    push_id: str
    model: str
    version: int
    epoch: int
    request: str
    delta: bool = False
    server: str = ""
    traceparent: str = ""


@dataclass(frozen=True)
class ShardCheckpoint:
    """What a store has kept of a shard that was arriving: the first `size` bytes, not proved.

    `tensors` are in the order of their bytes; `header_digest` is an xxh3-128.
    """

    index: int
    entry: ShardEntry
    tensors: tuple[TensorEntry, ...]
    header_digest: bytes
    size: int

    @property
    def is_whole(self) -> bool:
        return self.size == self.entry.size


@dataclass(frozen=True)
class OpenPush:
    record: PushRecord
    shards: tuple[ShardCheckpoint, ...]


#: Suffix of files that count for nothing; `Store.open` removes them.
TEMPORARY = ".tmp"


def replace(path: Path, data: bytes) -> None:
    """Write a file and flush it and its name; when this raises, no half of it is under `path`."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
    fd = durable_files.create(temporary)
    try:
        try:
            durable_files.write(fd, data)
            durable_files.fsync(fd)
        finally:
            os.close(fd)
        durable_files.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            durable_files.unlink(temporary)
        raise
    durable_files.flush_directory(path.parent)


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Replace a JSON document that proves its own integrity; see `replace`."""
    replace(path, encode_document(document))


def encode_document(document: Mapping[str, Any]) -> bytes:
    """Return a JSON document that proves its own integrity; equal ones have equal bytes."""
    body = json.dumps(document, separators=(",", ":"))
    return f'{{"xxh3_128":"{_digest(body)}","document":{body}}}'.encode()


def read_document(path: Path) -> dict[str, Any]:
    return decode_document(path.read_bytes())


def decode_document(data: bytes) -> dict[str, Any]:
    """Return what `encode_document` was given; raises ValueError for anything else."""
    try:
        frame = json.loads(data)
        document = frame["document"]
        good = frame["xxh3_128"] == _digest(json.dumps(document, separators=(",", ":")))
    except (TypeError, KeyError, RecursionError):
        good = False
    if not good or not isinstance(document, dict):
        raise ValueError("its digest does not match")
    return document


def _digest(body: str) -> str:
    return xxhash.xxh3_128_hexdigest(body.encode())


def based(records: Iterable[CommitRecord]) -> tuple[list[CommitRecord], list[CommitRecord]]:
    """Return the versions that can be read, and those whose base is missing or another one.

    `records` are those of one model, in ascending order of version.
    """
    good: dict[int, CommitRecord] = {}
    others = []
    for record in records:
        base = good.get(record.base_version)
        if record.base_version and (
            base is None
            or (base.content_digest, base.layout_digest)
            != (record.base_content_digest, record.layout_digest)
        ):
            others.append(record)
        else:
            good[record.version] = record
    return list(good.values()), others
