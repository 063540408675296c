"""Calls of WriteInPlace: what trainers send comes to transactions, which outlive the calls."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import attach_pb2 as pb
from weightsync_server.attach.in_place import InPlace, InPlaceOrder
from weightsync_server.engine.pause_options import pause_spec

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from weightsync.v1 import weightsync_pb2
    from weightsync_server.engine import EngineApplier, HostParts, ModelParts

__all__ = ["InPlaceCalls", "read_order"]

_LEASE_S = 60.0
_SHORTEST_S, _LONGEST_S = 0.1, 600.0


class InPlaceCalls:
    """Runs transactions to their end, whatever becomes of their callers.

    Args:
        model: What engines serve.
        host: What they share.
    """

    def __init__(self, model: ModelParts, host: HostParts) -> None:
        self._model, self._host = model, host
        self._running: set[asyncio.Task[weightsync_pb2.ApplyReport]] = set()

    async def run(
        self,
        applier: EngineApplier,
        order: InPlaceOrder,
        steps: AsyncIterator[pb.WriteInPlaceRequest],
    ) -> AsyncGenerator[pb.WriteInPlaceResponse]:
        """Yield what becomes of a transaction; a caller that leaves has taken it back.

        Args:
            applier: Of the engine.
            order: What it begins with.
            steps: What the trainer sends next.

        Raises:
            WeightSyncError: As `InPlace.run`.
        """
        received: asyncio.Queue[pb.WriteInPlaceRequest | None] = asyncio.Queue()
        begun: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def tell(transaction_id: str) -> None:
            begun.set_result(transaction_id)

        work = InPlace(applier, self._model, self._host, order, tell, received.get)
        task = asyncio.create_task(work.run(), name=f"in place {work.id}")
        self._running.add(task)
        task.add_done_callback(self._ended)
        reading = asyncio.create_task(_read(steps, received))
        try:
            either: set[asyncio.Future[Any]] = {task, begun}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if begun.done():
                message = pb.InPlaceBegun(transaction_id=begun.result())
                yield pb.WriteInPlaceResponse(begun=message)
            report = await asyncio.shield(task)
            yield pb.WriteInPlaceResponse(committed=pb.InPlaceCommitted(report=report))
        finally:
            received.put_nowait(None)
            reading.cancel()
            # Nobody else may end the stream while it is read.
            await asyncio.wait({reading})

    async def drain(self) -> None:
        """Wait for those that are open: their callers are gone by now."""
        while self._running:
            await asyncio.wait(self._running)

    def _ended(self, task: asyncio.Task[weightsync_pb2.ApplyReport]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            # Whoever still waits is told; it is no fault that nobody does.
            task.exception()


async def _read(
    steps: AsyncIterator[pb.WriteInPlaceRequest],
    received: asyncio.Queue[pb.WriteInPlaceRequest | None],
) -> None:
    # However it ends, the trainer says nothing more.
    with contextlib.suppress(Exception):
        async for step in steps:
            received.put_nowait(step)
    received.put_nowait(None)


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
