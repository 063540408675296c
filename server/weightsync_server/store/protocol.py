"""What every store promises, the checks before every path, and which errors mean damage.

There are three sets because three kinds of bytes are read, each wrong in its own ways.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.manifest import MAX_VERSION, Manifest
from weightsync_server.store.store_records import CommitRecord, OpenPush, PushRecord

#: Names of models, fit for a path.
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Store(Protocol):
    """Keeps versions, epochs and marks. Its methods are called from the event loop.

    If `durable`, a committed version survives a crash. If `local`, shards are files of this host,
    which can be kept in parts while they arrive and read again for little.
    """

    durable: bool
    local: bool
    url: str

    @property
    def lost(self) -> Sequence[str]:
        """A sentence for each committed version that `open` did not find whole."""

    async def open(self) -> list[CommitRecord]:
        """Recover, and return the committed versions by model and version.

        Leftovers of uncommitted versions are removed; a committed version with a file that is
        missing or has another length is put aside and not returned, nor is what is based on it.
        """

    def free_bytes(self) -> int:
        """Return how many bytes more it can take; blocks."""

    def shard_path(
        self, model: str, version: int, shard: int, *, delta: bool = False
    ) -> str | None:
        """Return the place to persist a shard to and load it from; None: this store keeps none.

        A path, or what `object_keys.is_location` knows. Before the commit it is where a shard is
        persisted to; afterwards, where it lies.
        """

    async def commit(
        self, record: CommitRecord, manifest: Manifest, delta: Manifest | None = None
    ) -> None:
        """Make a version exist, its shards having been persisted; when it raises, it does not.

        Repeating it with the same content changes nothing. `delta` is the manifest of the delta
        shards that were persisted in the place of the whole ones. Raises EPOCH_STALE,
        VERSION_CONFLICT, PUSH_INCOMPLETE, DISK_EXHAUSTED, FAULT.
        """

    async def fold(self, record: CommitRecord, manifest: Manifest) -> None:
        """Keep a delta in full from now on, its whole shards having been persisted.

        All or nothing: when it raises, the version is kept in one form or the other, and both can
        be read until the store is opened again. Nobody may read its delta shards any more.
        EPOCH_STALE: another server that uses the store has the newest epoch.
        """

    async def discard(self, model: str, version: int) -> None:
        """Remove what a failed push left; what is committed or another server's stays untouched."""

    async def manifest(self, model: str, version: int) -> Manifest:
        """Return the manifest of a committed version; VERSION_UNKNOWN, DATA_CORRUPT."""

    async def delta(self, model: str, version: int) -> Manifest:
        """Return the manifest of a version's delta shards; VERSION_UNKNOWN, DATA_CORRUPT."""

    async def tidy(self, model: str, version: int) -> None:
        """Remove whole shards that were persisted for a fold which is not to be."""

    async def delete(self, model: str, version: int) -> None:
        """Remove a version, its commit record first. An unknown one is fine.

        VERSION_IN_USE: another version is based on it. EPOCH_STALE: another server has the newest
        one.
        """

    async def committed_elsewhere(self, model: str) -> list[CommitRecord]:
        """Return versions that exist, by number, those of other servers with them, if it knows."""

    async def collects(self, model: str) -> bool:
        """Return whether this server may remove versions: of several, one may."""

    async def read_epoch(self, model: str) -> int:
        """Return the newest epoch written; 0 before the first."""

    async def write_epoch(self, model: str, epoch: int) -> None:
        """Record an epoch: when this returns, older writers can no longer commit."""

    async def read_marks(self, model: str) -> dict[str, Any]:
        """Return what `write_marks` wrote last; empty before the first."""

    async def write_marks(self, model: str, marks: Mapping[str, Any]) -> None:
        """Replace the marks (pins, rejections), all or nothing."""

    async def record_push(self, record: PushRecord) -> None:
        """Write down that a push is open, until its version is committed or discarded.

        VERSION_CONFLICT: its version comes, or came, through another server. EPOCH_STALE: another
        one that uses the store has its epoch.
        """

    async def open_pushes(self, model: str) -> list[OpenPush]:
        """Return the pushes of this server that were open when it last used the store."""


def check_model(model: str) -> str:
    if not MODEL_NAME.fullmatch(model):
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            f"model name {model[:140]!r} does not match {MODEL_NAME.pattern}; choose another name",
        )
    return model


def check_version(version: int) -> int:
    if type(version) is not int or not 1 <= version <= MAX_VERSION:
        raise WeightSyncError(
            Reason.REQUEST_INVALID, f"version {version!r} is not from 1 to {MAX_VERSION}"
        )
    return version


def check_epoch(epoch: int, newest: int) -> None:
    if epoch < newest:
        raise WeightSyncError(
            Reason.EPOCH_STALE,
            f"epoch {epoch} is older than {newest}, which another writer acquired; acquire a new "
            "epoch if this writer should take over",
            metadata={"epoch": str(newest)},
        )


#: Of whole shards, in shared memory or a file.
SHARD_DAMAGE = frozenset({Reason.DATA_CORRUPT, Reason.SHARD_INVALID, Reason.LAYOUT_INVALID})
#: Of delta shards: their own digests, and those of what they change, may differ.
DELTA_DAMAGE = frozenset({Reason.SHARD_INVALID, Reason.DIGEST_MISMATCH, Reason.LAYOUT_INVALID})
#: Of a version in the store, where files may be missing as well.
STORED_DAMAGE = SHARD_DAMAGE | {Reason.VERSION_UNKNOWN}
