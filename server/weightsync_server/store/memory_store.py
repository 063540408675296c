"""A store that keeps nothing beyond this process: for throwaway runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.manifest import Manifest
from weightsync_server.store.protocol import check_epoch, check_model, check_version
from weightsync_server.store.store_records import CommitRecord, OpenPush, PushRecord


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
        return [self._versions[key][0] for key in sorted(self._versions)]

    def free_bytes(self) -> int:
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
        _check(model, version)

    async def manifest(self, model: str, version: int) -> Manifest:
        try:
            return self._versions[_check(model, version)][1]
        except KeyError:
            raise WeightSyncError(
                Reason.VERSION_UNKNOWN, f"version {version} of {model} is not committed"
            ) from None

    async def fold(self, record: CommitRecord, manifest: Manifest) -> None:
        self._versions[_check(record.model, record.version)] = (record, manifest)

    async def delta(self, model: str, version: int) -> Manifest:
        _check(model, version)
        raise WeightSyncError(
            Reason.VERSION_UNKNOWN, f"version {version} of {model} is not kept as a delta"
        )

    async def tidy(self, model: str, version: int) -> None:
        _check(model, version)

    async def delete(self, model: str, version: int) -> None:
        self._versions.pop(_check(model, version), None)

    async def committed_elsewhere(self, model: str) -> list[CommitRecord]:
        check_model(model)
        return []

    async def collects(self, model: str) -> bool:
        check_model(model)
        return True

    async def read_epoch(self, model: str) -> int:
        return self._epochs.get(check_model(model), 0)

    async def write_epoch(self, model: str, epoch: int) -> None:
        check_epoch(epoch, self._epochs.get(check_model(model), 0))
        self._epochs[model] = epoch

    async def read_marks(self, model: str) -> dict[str, Any]:
        return dict(self._marks.get(check_model(model), {}))

    async def write_marks(self, model: str, marks: Mapping[str, Any]) -> None:
        self._marks[check_model(model)] = dict(marks)

    async def record_push(self, record: PushRecord) -> None:
        _check(record.model, record.version)

    async def open_pushes(self, model: str) -> list[OpenPush]:
        check_model(model)
        return []


def _check(model: str, version: int, shard: int = 0) -> tuple[str, int]:
    if shard < 0:
        raise WeightSyncError(Reason.REQUEST_INVALID, f"shard must be 0 or more, not {shard}")
    return check_model(model), check_version(version)
