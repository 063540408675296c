"""What people decided about versions, and what must be remembered of deleted ones; persisted."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightsync_server.store.protocol import Store


class Pins:
    """Pins, rejections and the highest number ever used.

    Each change is made to what the store has then; of two servers that change something at the same
    moment, the change of one may be lost. `rejected` has the reason by version, `highest` is that
    of the deleted committed versions.
    """

    def __init__(self, model: str, store: Store) -> None:
        self.pinned: set[int] = set()
        self.rejected: dict[int, str] = {}
        self.highest = 0
        self._model = model
        self._store = store
        self._lock = asyncio.Lock()

    async def open(self) -> None:
        async with self._lock:
            await self._read()

    async def change(
        self, version: int, *, pinned: bool | None = None, rejected: str | None = None
    ) -> None:
        """Persist a change, then make it; what is None stays. An empty reason ends a rejection."""
        async with self._lock:
            await self._read()
            pins, reasons = set(self.pinned), dict(self.rejected)
            if pinned is not None:
                (pins.add if pinned else pins.discard)(version)
            if rejected is not None:
                reasons[version] = rejected
            if not reasons.get(version):
                reasons.pop(version, None)
            await self._write(pins, reasons, self.highest)

    async def use(self, version: int) -> None:
        """Persist that a number was used, so that it is not used again when its version is gone."""
        async with self._lock:
            await self._read()
            await self._write(self.pinned, self.rejected, max(self.highest, version))

    async def _read(self) -> None:
        marks = await self._store.read_marks(self._model)
        self.pinned = {int(version) for version in marks.get("pinned", [])}
        self.rejected = {int(v): str(reason) for v, reason in marks.get("rejected", {}).items()}
        self.highest = max(self.highest, int(marks.get("highest", 0)))

    async def _write(self, pins: set[int], reasons: dict[int, str], highest: int) -> None:
        if (pins, reasons, highest) == (self.pinned, self.rejected, self.highest):
            return
        await self._store.write_marks(
            self._model,
            {
                "pinned": sorted(pins),
                "rejected": {str(v): reason for v, reason in sorted(reasons.items())},
                "highest": highest,
            },
        )
        self.pinned, self.rejected, self.highest = pins, reasons, highest
