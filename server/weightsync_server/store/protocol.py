"""What every store promises, and the checks that stand before every path."""

from __future__ import annotations

import re
from dataclasses import MISSING, asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.manifest import MAX_VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightsync.model.manifest import Manifest, ShardEntry, TensorEntry

__all__ = [
    "CommitRecord",
    "OpenPush",
    "PushRecord",
    "ShardCheckpoint",
    "Store",
    "check_epoch",
    "check_model",
    "check_version",
]

_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


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
        kinds = {"metadata": dict, "trainer_verified": bool, "adopted": bool}
        texts = ("model", "content_digest", "manifest_digest", "layout_digest")
        kinds |= dict.fromkeys(texts, str)
        # Records of earlier releases lack what has a default.
        late = {item.name: item.default for item in fields(cls) if item.default is not MISSING}
        kinds |= {name: type(value) for name, value in late.items()}
        every = dict.fromkeys(cls.__annotations__, int) | kinds
        return cls(**_checked({**late, **document}, every))


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
        kinds = {"push_id": str, "model": str, "version": int, "epoch": int, "request": str}
        late: dict[str, Any] = {"delta": False, "server": ""}
        kinds |= {name: type(value) for name, value in late.items()}
        return cls(**_checked({**late, **document}, kinds))


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


@dataclass(frozen=True)
class OpenPush:
    """A push that survived.

    Attributes:
        record: What it is.
        shards: What was kept of it.
    """

    record: PushRecord
    shards: tuple[ShardCheckpoint, ...]


def _checked(document: Mapping[str, Any], kinds: Mapping[str, type]) -> dict[str, Any]:
    for name, kind in kinds.items():
        if type(document.get(name)) is not kind:
            raise ValueError(f"{name} is {document.get(name)!r}")
    return {name: document[name] for name in kinds}


class Store(Protocol):
    """Keeps versions, epochs and marks. Its methods are called from the event loop.

    Attributes:
        durable: Whether a committed version survives a crash.
        url: Where it is.
    """

    durable: bool
    url: str

    @property
    def lost(self) -> Sequence[str]:
        """A sentence for each committed version that `open` did not find whole."""

    async def open(self) -> list[CommitRecord]:
        """Recover, and return the committed versions by model and version.

        Leftovers of uncommitted versions are removed; a committed version with a file that is
        missing or has another length is put aside and not returned, nor is what is based on it.

        Raises:
            WeightSyncError: The store cannot be used.
        """

    def free_bytes(self) -> int:
        """Return how many bytes more it can take; blocks.

        Raises:
            OSError: It cannot be asked.
        """

    def shard_target(
        self, model: str, version: int, shard: int, *, delta: bool = False
    ) -> str | None:
        """Return the path to persist a shard to; None: this store keeps none."""

    def shard_source(
        self, model: str, version: int, shard: int, *, delta: bool = False
    ) -> str | None:
        """Return the path to load a shard from; None: this store keeps none."""

    async def commit(
        self, record: CommitRecord, manifest: Manifest, delta: Manifest | None = None
    ) -> None:
        """Make a version exist, its shards having been persisted; when it raises, it does not.

        Repeating it with the same content changes nothing.

        Args:
            record: What makes it exist.
            manifest: Of the whole version.
            delta: Of the delta shards that were persisted in the place of the whole ones.

        Raises:
            WeightSyncError: EPOCH_STALE, VERSION_CONFLICT, PUSH_INCOMPLETE, DISK_EXHAUSTED, FAULT.
        """

    async def fold(self, record: CommitRecord, manifest: Manifest) -> None:
        """Keep a delta in full from now on, its whole shards having been persisted.

        All or nothing: when it raises, the version is kept in one form or the other, and both can
        be read until the store is opened again. Nobody may read its delta shards any more.

        Raises:
            WeightSyncError: VERSION_UNKNOWN, PUSH_INCOMPLETE, DISK_EXHAUSTED, FAULT.
        """

    async def discard(self, model: str, version: int) -> None:
        """Remove what a failed push left; what is committed or another server's stays untouched."""

    async def manifest(self, model: str, version: int) -> Manifest:
        """Return the manifest of a committed version.

        Raises:
            WeightSyncError: VERSION_UNKNOWN, DATA_CORRUPT.
        """

    async def delta(self, model: str, version: int) -> Manifest:
        """Return the manifest of the delta shards of a version that is kept as a delta.

        Raises:
            WeightSyncError: VERSION_UNKNOWN, DATA_CORRUPT.
        """

    async def tidy(self, model: str, version: int) -> None:
        """Remove whole shards that were persisted for a fold which is not to be."""

    async def delete(self, model: str, version: int) -> None:
        """Remove a version, its commit record first. An unknown one is fine."""

    async def read_epoch(self, model: str) -> int:
        """Return the newest epoch written; 0 before the first.

        Raises:
            WeightSyncError: DATA_CORRUPT.
        """

    async def write_epoch(self, model: str, epoch: int) -> None:
        """Record an epoch: when this returns, older writers can no longer commit.

        Raises:
            WeightSyncError: EPOCH_STALE when a newer one is recorded.
        """

    async def read_marks(self, model: str) -> dict[str, Any]:
        """Return what `write_marks` wrote last; empty before the first.

        Raises:
            WeightSyncError: DATA_CORRUPT.
        """

    async def write_marks(self, model: str, marks: Mapping[str, Any]) -> None:
        """Replace the marks (pins, rejections), all or nothing."""

    async def record_push(self, record: PushRecord) -> None:
        """Write down that a push is open, until its version is committed or discarded.

        Raises:
            WeightSyncError: VERSION_CONFLICT when its version comes, or came, through another
                server; DISK_EXHAUSTED, FAULT.
        """

    async def open_pushes(self, model: str) -> list[OpenPush]:
        """Return the pushes of this server that were open when it last used the store."""


def check_model(model: str) -> str:
    """Return the model name, fit for a path.

    Raises:
        WeightSyncError: REQUEST_INVALID.
    """
    if not _MODEL.fullmatch(model):
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            f"model name {model[:140]!r} does not match {_MODEL.pattern}; choose another name",
        )
    return model


def check_version(version: int) -> int:
    """Return the version number, fit for a path.

    Raises:
        WeightSyncError: REQUEST_INVALID.
    """
    if type(version) is not int or not 1 <= version <= MAX_VERSION:
        raise WeightSyncError(
            Reason.REQUEST_INVALID, f"version {version!r} is not from 1 to {MAX_VERSION}"
        )
    return version


def check_epoch(epoch: int, newest: int) -> None:
    """Refuse a writer that is not the newest.

    Raises:
        WeightSyncError: EPOCH_STALE.
    """
    if epoch < newest:
        raise WeightSyncError(
            Reason.EPOCH_STALE,
            f"epoch {epoch} is older than {newest}, which another writer acquired; acquire a new "
            "epoch if this writer shall take over",
            metadata={"epoch": str(newest)},
        )
