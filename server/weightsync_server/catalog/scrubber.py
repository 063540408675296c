"""Stored versions are digested again and again, slowly: damage is known before it is met."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.log_lines import event
from weightsync.model.digest import TensorDigester
from weightsync.model.layout import check_header
from weightsync.model.manifest import Manifest
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.ops.os_errors import read_fault
from weightsync_server.ops.tasks import in_thread
from weightsync_server.store.protocol import STORED_DAMAGE, Store

if TYPE_CHECKING:
    from weightsync_server.catalog.table import VersionTable


logger = logging.getLogger(__name__)

_PIECE = 4 << 20
#: Seconds until the first round, which leaves a start to those who wait for it, and between rounds.
_FIRST_S, _ROUND_S = 10.0, 60.0


class Scrubber:
    """Marks and reports stored versions whose bytes are damaged; heals nothing.

    `lock` is held by any task that removes stored deltas.
    """

    def __init__(
        self, table: VersionTable, store: Store, lock: asyncio.Lock, bytes_per_s: int
    ) -> None:
        self._table = table
        self._store = store
        self._lock = lock
        self._bytes_per_s = bytes_per_s

    async def run(self) -> None:
        await asyncio.sleep(_FIRST_S)
        while True:
            for record in reversed(self._table.list()):
                if record.durability == pb.DURABILITY_COMMITTED:
                    await self._scrub(record)
            await asyncio.sleep(_ROUND_S)

    async def _scrub(self, record: VersionRecord) -> None:
        try:
            await self.scrub(record)
        except Exception:
            # The other versions are looked at all the same.
            logger.exception("version %d could not be checked", record.version)

    async def scrub(self, record: VersionRecord) -> None:
        """Digest a stored version and note what is wrong with it, unless that cannot be known."""
        base, damage = record.base, ""
        try:
            await self._check(record)
        except (WeightSyncError, OSError) as error:
            async with self._lock:
                folded = record.base is not base
            if folded or self._table.find(record.version) is not record:
                return  # It was deleted meanwhile, or is kept in full now.
            fault = read_fault(error, "reading it") if isinstance(error, OSError) else error
            if fault.reason not in STORED_DAMAGE:
                # Too few descriptors, no memory: nothing is known, and it passes.
                logger.warning("version %d is checked later: %s", record.version, fault.message)
                return
            damage = fault.message
        if damage and not record.damaged:
            logger.error(
                "version %d is damaged in the store: %s",
                record.version,
                damage,
                extra=event("version.damaged", version=record.version),
            )
        elif record.damaged and not damage:
            logger.warning("version %d is whole in the store again", record.version)
        record.damage(damage)
        if damage:
            self._table.report_damage(record)

    async def _check(self, record: VersionRecord) -> None:
        store, delta = self._store, record.base is not None
        if delta:
            manifest = await store.delta(record.model, record.version)
        else:
            manifest = await store.manifest(record.model, record.version)
        for shard, expected in enumerate(manifest.digests_by_shard):
            source = store.shard_path(record.model, record.version, shard, delta=delta)
            if source is None:
                return
            fd = await in_thread(os.open, source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                # What lies on the disk counts, not what memory still has of it; and a scrubber
                # leaves memory to those who serve.
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                await self._check_shard(fd, manifest, shard, expected)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    async def _check_shard(
        self, fd: int, manifest: Manifest, shard: int, expected: Sequence[bytes]
    ) -> None:
        entry, tensors = manifest.layout.shards[shard], manifest.layout.by_shard[shard]
        if os.fstat(fd).st_size != entry.size:
            raise WeightSyncError(Reason.DATA_CORRUPT, f"shard {shard} has a different length")
        header = await in_thread(os.pread, fd, entry.header_size, 8)
        await in_thread(check_header, header, tensors)
        for tensor, digest in zip(tensors, expected, strict=True):
            found = TensorDigester()
            for at in range(tensor.begin, tensor.end, _PIECE):
                size = min(_PIECE, tensor.end - at)
                data = await in_thread(os.pread, fd, size, entry.data_start + at)
                await in_thread(found.update, data)
                await asyncio.sleep(size / self._bytes_per_s)
            if found.digest() != digest:
                raise WeightSyncError(
                    Reason.DATA_CORRUPT, f"tensor {tensor.name[:100]!r} has a different digest"
                )
