"""Calls of WriteInPlace: what trainers send comes to transactions, which outlive the calls."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import attach_pb2 as pb
from weightsync_server.attach.in_place import InPlace, InPlaceOrder
from weightsync_server.attach.trainer_line import TrainerLine
from weightsync_server.engine.pause_options import pause_spec

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from weightsync.v1 import weightsync_pb2
    from weightsync_server.attach.attach_metrics import AttachMetrics
    from weightsync_server.attach.attachments import Attachment
    from weightsync_server.attach.in_place_versions import InPlaceVersions
    from weightsync_server.attach.open_blocks import OpenBlocks
    from weightsync_server.engine import EngineApplier, HostParts, ModelParts

__all__ = ["InPlaceCalls", "read_order"]

_LEASE_S = 60.0
_SHORTEST_S, _LONGEST_S = 0.1, 600.0


class InPlaceCalls:
    """Runs transactions to their end, whatever becomes of their callers.

    Args:
        model: What engines serve.
        host: What they share.
        versions: Drops what does not count.
        metrics: Counts their ends.
        blocks: What is written with.
    """

    def __init__(
        self,
        model: ModelParts,
        host: HostParts,
        versions: InPlaceVersions,
        metrics: AttachMetrics,
        blocks: OpenBlocks,
    ) -> None:
        self._model, self._host, self._versions = model, host, versions
        self._metrics, self._blocks = metrics, blocks
        self._running: set[asyncio.Task[weightsync_pb2.ApplyReport]] = set()

    async def run(
        self,
        applier: EngineApplier,
        order: InPlaceOrder,
        steps: AsyncIterator[pb.WriteInPlaceRequest],
        attachment: Attachment,
    ) -> AsyncGenerator[pb.WriteInPlaceResponse]:
        """Yield what becomes of a transaction; a caller that leaves has taken it back.

        Args:
            applier: Of the engine.
            order: What it begins with.
            steps: What the trainer sends next.
            attachment: Of the trainer.

        Raises:
            WeightSyncError: As `InPlace.run`.
        """
        line = TrainerLine(steps)
        parts = self._model, self._host, self._blocks
        work = InPlace(applier, *parts, order, line, attachment, self._versions)
        task = asyncio.create_task(work.run(), name=f"in place {work.id}")
        self._running.add(task)
        task.add_done_callback(self._ended)
        task.add_done_callback(lambda _: line.end())
        try:
            async for answer in line.answers():
                yield answer
            committed = pb.InPlaceCommitted(report=await asyncio.shield(task))
            yield pb.WriteInPlaceResponse(committed=committed)
        finally:
            await line.close()

    async def drain(self) -> None:
        """Wait for those that are open: their callers are gone by now."""
        while self._running:
            await asyncio.wait(self._running)

    def _ended(self, task: asyncio.Task[weightsync_pb2.ApplyReport]) -> None:
        self._running.discard(task)
        # Whoever still waits is told; it is no fault that nobody does.
        error = None if task.cancelled() else task.exception()
        restored = isinstance(error, WeightSyncError) and error.reason is Reason.APPLY_RESTORED
        done = "committed" if error is None and not task.cancelled() else "failed"
        self._metrics.count_transaction("restored" if restored else done)


def read_order(begin: pb.BeginInPlace) -> InPlaceOrder:
    """Return what a trainer begins with.

    Raises:
        WeightSyncError: REQUEST_INVALID, naming the field.
    """
    lease_s = begin.lease.ToNanoseconds() / 1e9 if begin.HasField("lease") else _LEASE_S
    if not _SHORTEST_S <= lease_s <= _LONGEST_S:
        raise WeightSyncError(
            Reason.REQUEST_INVALID, f"lease must be {_SHORTEST_S:g} to {_LONGEST_S:g} s"
        )
    return InPlaceOrder(begin.base_version, pause_spec(begin.pause), lease_s)
