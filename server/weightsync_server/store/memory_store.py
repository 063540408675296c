"""A store that keeps nothing beyond this process: for throwaway runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.store.protocol import check_epoch, check_model, check_version

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weightsync.model.manifest import Manifest
    from weightsync_server.store.store_records import CommitRecord, OpenPush, PushRecord

__all__ = ["MemoryStore"]


class MemoryStore:
    """Keeps manifests, epochs and marks in memory, and no shard: only slots hold bytes."""

    durable = False
    local = True
    url = "memory://"
    lost = ()

    def __init__(self) -> None:
        self._versions: dict[tuple[str, int], tuple[CommitRecord, Manifest]] = {}
        self._epochs: dict[str, int] = {}
        self._marks: dict[str, dict[str, Any]] = {}

    async def open(self) -> list[CommitRecord]:
        """Return what was committed since this object was made."""
        return [self._versions[key][0] for key in sorted(self._versions)]

    def free_bytes(self) -> int:
        """Return a number without meaning: no shard is ever stored here."""
        return 1 << 62

    def shard_path(
        self, model: str, version: int, shard: int, *, delta: bool = False
    ) -> str | None:
        """Return None: shards stay in their slot, and a version that has left it is gone."""
        _check(model, version, shard)
        return None

    async def commit(
        self, record: CommitRecord, manifest: Manifest, delta: Manifest | None = None
    ) -> None:
        """Make a version exist until this process ends; its slot holds it in full."""
        key = _check(record.model, record.version)
        if not record.adopted:
            check_epoch(record.epoch, self._epochs.get(record.model, 0))
        known = self._versions.setdefault(key, (record, manifest))[0]
        if known.content_digest != record.content_digest:
            raise WeightSyncError(
                Reason.VERSION_CONFLICT,
                f"version {record.version} of {record.model} is committed with other content; "
                "push a higher version",
            )

    async def discard(self, model: str, version: int) -> None:
        """Do nothing: an uncommitted version left nothing here."""
        _check(model, version)

    async def manifest(self, model: str, version: int) -> Manifest:
        """Return the manifest of a committed version."""
        try:
            return self._versions[_check(model, version)][1]
        except KeyError:
            raise WeightSyncError(
                Reason.VERSION_UNKNOWN, f"version {version} of {model} is not committed"
            ) from None

    async def fold(self, record: CommitRecord, manifest: Manifest) -> None:
        """Take the record; a version is never kept as a delta here."""
        self._versions[_check(record.model, record.version)] = (record, manifest)

    async def delta(self, model: str, version: int) -> Manifest:
        """Refuse: a version is never kept as a delta here."""
        _check(model, version)
        raise WeightSyncError(
            Reason.VERSION_UNKNOWN, f"version {version} of {model} is not kept as a delta"
        )

    async def tidy(self, model: str, version: int) -> None:
        """Do nothing: no shard is kept."""
        _check(model, version)

    async def delete(self, model: str, version: int) -> None:
        """Forget a version."""
        self._versions.pop(_check(model, version), None)

    async def committed_elsewhere(self, model: str) -> list[CommitRecord]:
        """Return nothing: no other server has it."""
        check_model(model)
        return []

    async def collects(self, model: str) -> bool:
        """Return True: no other server has it."""
        check_model(model)
        return True

    async def read_epoch(self, model: str) -> int:
        """Return the newest epoch written; 0 before the first."""
        return self._epochs.get(check_model(model), 0)

    async def write_epoch(self, model: str, epoch: int) -> None:
        """Record an epoch until this process ends."""
        check_epoch(epoch, self._epochs.get(check_model(model), 0))
        self._epochs[model] = epoch

    async def read_marks(self, model: str) -> dict[str, Any]:
        """Return what `write_marks` wrote last; empty before the first."""
        return dict(self._marks.get(check_model(model), {}))

    async def write_marks(self, model: str, marks: Mapping[str, Any]) -> None:
        """Replace the marks until this process ends."""
        self._marks[check_model(model)] = dict(marks)

    async def record_push(self, record: PushRecord) -> None:
        """Do nothing: no push survives."""
        _check(record.model, record.version)

    async def open_pushes(self, model: str) -> list[OpenPush]:
        """Return nothing: no push survives."""
        check_model(model)
        return []


def _check(model: str, version: int, shard: int = 0) -> tuple[str, int]:
    if shard < 0:
        raise WeightSyncError(Reason.REQUEST_INVALID, f"shard {shard} is negative")
    return check_model(model), check_version(version)
