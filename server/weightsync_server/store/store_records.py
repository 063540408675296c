"""What a store writes down of versions and of open pushes, and the checks of what it reads."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weightsync.model.manifest import ShardEntry, TensorEntry

__all__ = ["CommitRecord", "DeltaFacts", "OpenPush", "PushRecord", "ShardCheckpoint"]

_Record = TypeVar("_Record", "CommitRecord", "PushRecord")
#: What a JSON document holds of a field, by its annotation.
_KINDS = {"Mapping[str, str]": dict, "bool": bool, "float": float, "int": int, "str": str}


@dataclass(frozen=True)
class CommitRecord:
    """What makes a version exist.

    Attributes:
        model: Model name.
        version: Version number.
        content_digest: Identity of the version.
        manifest_digest: Identity of this encoding of it.
        layout_digest: Digest of its layout.
        epoch: Epoch of the writer.
        commit_time_ns: Wall clock in nanoseconds since 1970.
        metadata: What the trainer said, such as its step.
        size_bytes: Sum of the shard sizes.
        tensor_count: Tensors.
        shard_count: Shards.
        trainer_verified: Whether the digests equal those that the trainer sent.
        adopted: Whether it is an engine's checkpoint and no push.
        push_id: The push that brought it; empty: none.
        idempotency_key: Key of that push; empty: none.
        base_version: The version whose bytes it is kept as a change of; 0: it is kept in full.
        base_content_digest: Content of that version; empty: none.
        delta_bytes: Sum of the sizes of the delta shards that are kept of it.
        changed_elements: Where it was pushed as a delta: elements that the delta told.
        changed_fraction: Their share of all elements.
        client_run: The run of the client that pushed it; empty: not known.
        epoch_taken: That run took the epoch.
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

    @property
    def stored_bytes(self) -> int:
        """Bytes of shards that the store keeps of it."""
        return self.delta_bytes if self.base_version else self.size_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values, read back by `from_json`."""
        return asdict(self) | {"metadata": dict(self.metadata)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> CommitRecord:
        """Read what `to_json` returned.

        Raises:
            ValueError: It is no such document.
        """
        return _from_json(cls, document)


@dataclass(frozen=True)
class DeltaFacts:
    """What a commit record says of a version that was pushed as a delta.

    Attributes:
        changed_elements: Elements that the delta told.
        changed_fraction: Their share of all elements.
        base_version: The version whose bytes it is kept as a change of; 0: it is kept in full.
        base_content_digest: Content of that version; empty: none.
        delta_bytes: Sum of the sizes of the delta shards that are kept of it.
    """

    changed_elements: int
    changed_fraction: float
    base_version: int = 0
    base_content_digest: str = ""
    delta_bytes: int = 0


@dataclass(frozen=True)
class PushRecord:
    """What must be known of an open push after a crash.

    Attributes:
        push_id: Names it.
        model: Model name.
        version: The version it brings.
        epoch: Epoch of its writer.
        request: The call that opened it, as it came, hexadecimal.
        delta: Its shards are those of a delta.
        server: Identity of the server that has it; empty: that of an earlier release.
    """

    push_id: str
    model: str
    version: int
    epoch: int
    request: str
    delta: bool = False
    server: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values, read back by `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> PushRecord:
        """Read what `to_json` returned.

        Raises:
            ValueError: It is no such document.
        """
        return _from_json(cls, document)


@dataclass(frozen=True)
class ShardCheckpoint:
    """What a store has kept of a shard that was arriving.

    Attributes:
        index: Index in the push.
        entry: Name and sizes.
        tensors: In the order of their bytes.
        header_digest: xxh3-128 of the header.
        size: Bytes kept, from the first on; not proved yet.
    """

    index: int
    entry: ShardEntry
    tensors: tuple[TensorEntry, ...]
    header_digest: bytes
    size: int

    @property
    def is_whole(self) -> bool:
        """All of its bytes were kept."""
        return self.size == self.entry.size


@dataclass(frozen=True)
class OpenPush:
    """A push that survived.

    Attributes:
        record: What it is.
        shards: What was kept of it.
    """

    record: PushRecord
    shards: tuple[ShardCheckpoint, ...]


def _from_json(kind: type[_Record], document: Mapping[str, Any]) -> _Record:
    values: dict[str, Any] = {}
    for field in fields(kind):
        # Records of earlier releases lack what has a default.
        default = None if field.default is MISSING else field.default
        values[field.name] = document.get(field.name, default)
        if type(values[field.name]) is not _KINDS[str(field.type)]:
            raise ValueError(f"{field.name} is {values[field.name]!r}")
    return kind(**values)
