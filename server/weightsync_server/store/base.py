"""What every store promises, and the checks that stand before every path."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weightsync.manifest import Manifest

__all__ = ["MAX_VERSION", "CommitRecord", "Store", "check_epoch", "check_model", "check_version"]

#: The largest version and epoch: the largest integer that every JSON reader keeps exactly.
MAX_VERSION = (1 << 53) - 1

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
        values: dict[str, Any] = {}
        for name in cls.__dataclass_fields__:
            value = document.get(name)
            if type(value) is not kinds.get(name, int):
                msg = f"{name} is {value!r}"
                raise ValueError(msg)
            values[name] = value
        return cls(**values)


class Store(Protocol):
    """Keeps versions, epochs and marks. Its methods are called from the event loop.

    Attributes:
        durable: Whether a committed version survives a crash.
        url: Where it is.
    """

    durable: bool
    url: str

    async def open(self) -> list[CommitRecord]:
        """Recover, and return the committed versions by model and version.

        Leftovers of uncommitted versions are removed; a committed version with a file that is
        missing or has another length is put aside and not returned.

        Raises:
            WeightSyncError: The store cannot be used.
        """

    def free_bytes(self) -> int:
        """Return how many bytes more it can take; blocks.

        Raises:
            OSError: It cannot be asked.
        """

    def shard_target(self, model: str, version: int, shard: int) -> str | None:
        """Return the path to persist a shard to; None: this store keeps none."""

    def shard_source(self, model: str, version: int, shard: int) -> str | None:
        """Return the path to load a shard from; None: this store keeps none."""

    async def commit(self, record: CommitRecord, manifest: Manifest) -> None:
        """Make a version exist, its shards having been persisted; when it raises, it does not.

        Repeating it with the same content changes nothing.

        Raises:
            WeightSyncError: EPOCH_STALE, VERSION_CONFLICT, PUSH_INCOMPLETE, DISK_EXHAUSTED, FAULT.
        """

    async def discard(self, model: str, version: int) -> None:
        """Remove what a failed push left; a committed version stays untouched."""

    async def manifest(self, model: str, version: int) -> Manifest:
        """Return the manifest of a committed version.

        Raises:
            WeightSyncError: VERSION_UNKNOWN, DATA_CORRUPT.
        """

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
