"""A stand-in for what copies from GPUs: it copies from bytes."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

from weightsync.shm.incoming_version import HANDLE_BYTES

if TYPE_CHECKING:
    from weightsync.errors import WeightSyncError
    from weightsync.shm.segments import Segment
    from weightsync_server.workers.fetch.fetch_api import GpuSource


class Copier:
    """Copies from allocations in this process; it ends as the real one does.

    Attributes:
        gate: Set: nothing holds it up.
        errors: Raised one after the other, before anything is copied.
        begun: Devices that it was asked to copy from.
        trainers: For whom, each.
        busy: Copies under way.
    """

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.errors: list[WeightSyncError] = []
        self.begun: list[str] = []
        self.trainers: list[str] = []
        self.busy = 0
        self._memory: dict[str, bytes] = {}

    def allocate(self, data: bytes) -> str:
        handle = secrets.token_hex(HANDLE_BYTES)
        self._memory[handle] = data
        return handle

    async def collect(self, segment: Segment, source: GpuSource) -> None:
        self.trainers.append(source.trainer)
        self.begun.append(source.device)
        self.busy += 1
        try:
            called_off = await self._held_up()
            if self.errors:
                raise self.errors.pop(0)
            for number, offset, at, size in source.pieces:
                memory = self._memory[source.handles[number]]
                segment.view[at : at + size] = memory[offset : offset + size]
            for piece in source.strided:
                memory = self._memory[source.handles[piece.handle]]
                for row in range(piece.rows):
                    begin, at = piece.offset + row * piece.run, piece.at + row * piece.stride
                    segment.view[at : at + piece.run] = memory[begin : begin + piece.run]
        finally:
            self.busy -= 1
        if called_off:
            raise asyncio.CancelledError

    async def _held_up(self) -> bool:
        called_off = False
        while not self.gate.is_set():
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                called_off = True
        return called_off
