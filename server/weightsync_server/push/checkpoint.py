"""Received bytes are made durable behind the receive, so that a crash of the server costs few."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.ops.os_errors import translate_os_errors

if TYPE_CHECKING:
    from weightsync.shm.segments import Segment
    from weightsync_server.ops.meters import Meters
    from weightsync_server.push.limits import PushLimits
    from weightsync_server.push.reservation import PushReservation
    from weightsync_server.push.shard_state import ShardState
    from weightsync_server.workers.fetch.fetch_api import FetchApi

__all__ = ["Checkpointer"]

logger = logging.getLogger(__name__)


class Checkpointer:
    """Makes the shards of one push durable, as far as they came. It raises what goes wrong.

    Args:
        reservation: Where they go.
        fetch: Does it.
        limits: How much at once.
        meters: Durations.
    """

    def __init__(
        self, reservation: PushReservation, fetch: FetchApi, limits: PushLimits, meters: Meters
    ) -> None:
        self._reservation = reservation
        self._fetch = fetch
        self._limits = limits
        self._meters = meters

    def next_watermark(self, shard: ShardState) -> int:
        """Return the number of received bytes at which it is worth it again."""
        if not self._reservation.in_parts:
            return shard.entry.size
        return min(shard.received + self._limits.keep_bytes, shard.entry.size)

    def lags(self, shard: ShardState) -> bool:
        """Return whether so much is not durable yet that a crash would lose too much."""
        if not self._reservation.in_parts:
            return False
        lag = shard.received - shard.durable_bytes
        return lag > self._limits.loss_bytes - self._limits.keep_bytes

    async def catch_up(self, shard: ShardState, segment: Segment) -> None:
        """Make durable what came of an incomplete shard, where it is worth it.

        Raises:
            WeightSyncError: DISK_EXHAUSTED, FAULT, FETCHER_FAILED, SHUTTING_DOWN.
        """
        least = self._limits.keep_bytes
        if not self._reservation.in_parts:
            return
        while shard.received - shard.durable_bytes >= least and not shard.complete:
            await self._step(shard, segment)

    async def finish(self, shard: ShardState, segment: Segment) -> None:
        """Make a whole shard durable; see `catch_up`."""
        if shard.tasks.checkpoint is not None:
            await asyncio.wait([shard.tasks.checkpoint])
        while shard.durable_bytes < shard.entry.size:
            await self._step(shard, segment)

    async def save(self, shard: ShardState) -> None:
        """Make all that came of a shard durable; what cannot be made so is logged."""
        segment = shard.segment
        if segment is None or not shard.headed:
            return
        if not (self._reservation.in_parts or shard.complete):
            return
        try:
            while shard.durable_bytes < shard.received:
                await self._step(shard, segment)
        except WeightSyncError as error:
            durable = shard.durable_bytes
            logger.warning("shard %d is kept up to byte %d: %s", shard.index, durable, error)

    async def _step(self, shard: ShardState, segment: Segment) -> None:
        target = self._reservation.target(shard)
        if target is None:
            raise WeightSyncError(Reason.FAULT, "this store keeps no shards; use another store")
        with translate_os_errors(f"keeping shard {shard.index}"):
            await failpoints.reach("receive.keep")
        begin, end, started = shard.durable_bytes, shard.received, time.perf_counter()
        await self._fetch.keep(segment, shard.entry, begin, end, target)
        shard.durable_bytes = end
        if begin == 0:
            # The first bytes reserve the whole file.
            self._reservation.disk.wrote(shard.entry.size)
        self._meters.observe_phase("persist", time.perf_counter() - started)
