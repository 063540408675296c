"""What people decided about versions, and what must be remembered of deleted ones; persisted."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightsync_server.store.protocol import Store


class Pins:
    """Pins, rejections and the highest number ever used.

    Each change is made to what the store has then; of two servers that change something at the same
    moment, the change of one may be lost. `rejected` and `on_hold` have the reason by version,
    `highest` is that of the deleted committed versions.
    """

    def __init__(self, model: str, store: Store) -> None:
        self.pinned: set[int] = set()
        self.rejected: dict[int, str] = {}
        self.on_hold: dict[int, str] = {}
        self.highest = 0
        self._model = model
        self._store = store
        self._lock = asyncio.Lock()

    async def open(self) -> None:
        async with self._lock:
            await self._read()

    async def change(
        self,
        version: int,
        *,
        pinned: bool | None = None,
        rejected: str | None = None,
        on_hold: str | None = None,
    ) -> None:
        """Persist a change, then make it; what is None stays. An empty reason ends what it is for.

        A version that is rejected is not held as well.
        """
        async with self._lock:
            await self._read()
            pins = set(self.pinned)
            if pinned is not None:
                (pins.add if pinned else pins.discard)(version)
            reasons = _changed(self.rejected, version, rejected)
            kept = _changed(self.on_hold, version, "" if rejected else on_hold)
            await self._write(pins, reasons, kept, self.highest)

    async def use(self, version: int) -> None:
        """Persist that a number was used, so that it is not used again when its version is gone."""
        async with self._lock:
            await self._read()
            highest = max(self.highest, version)
            await self._write(self.pinned, self.rejected, self.on_hold, highest)

    async def _read(self) -> None:
        marks = await self._store.read_marks(self._model)
        self.pinned = {int(version) for version in marks.get("pinned", [])}
        self.rejected = {int(v): str(reason) for v, reason in marks.get("rejected", {}).items()}
        self.on_hold = {int(v): str(reason) for v, reason in marks.get("held", {}).items()}
        self.highest = max(self.highest, int(marks.get("highest", 0)))

    async def _write(
        self, pins: set[int], reasons: dict[int, str], on_hold: dict[int, str], highest: int
    ) -> None:
        now = pins, reasons, on_hold, highest
        if now == (self.pinned, self.rejected, self.on_hold, self.highest):
            return
        marks = {"pinned": sorted(pins), "rejected": _named(reasons), "highest": highest}
        # Of a release that knows of none the document stays what it was.
        await self._store.write_marks(
            self._model, marks | ({"held": _named(on_hold)} if on_hold else {})
        )
        self.pinned, self.rejected, self.on_hold, self.highest = now


def _changed(reasons: dict[int, str], version: int, reason: str | None) -> dict[int, str]:
    changed = dict(reasons)
    if reason is not None:
        changed[version] = reason
    if not changed.get(version):
        changed.pop(version, None)
    return changed


def _named(reasons: dict[int, str]) -> dict[str, str]:
    return {str(version): reason for version, reason in sorted(reasons.items())}
