"""A trainer's transfer and what a server has the ranks do with their devices, never both."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

__all__ = ["DeviceTurns"]

#: How often it is looked whether the ranks are free, seconds.
_LOOK_S = 0.01


class DeviceTurns:
    """Keeps apart what waits for a trainer on the device and what waits for the device.

    A rank that synchronizes its device while a broadcast waits for its trainer waits for the
    trainer too: in a pause, or where nobody can ask it any more to give the trainer up.

    Args:
        busy: Whether something for a server is under way.
        settle: Returns when no rank is at work for a server any more; raises RuntimeError.

    Attributes:
        receiving: Whether it is a trainer's turn.
    """

    def __init__(self, busy: Callable[[], bool], settle: Callable[[], Awaitable[None]]) -> None:
        self.receiving = False
        self._busy = busy
        self._settle = settle

    def check_free(self) -> None:
        """Refuse what a server wants while a trainer sends.

        Raises:
            WeightSyncError: APPLY_BUSY.
        """
        if self.receiving:
            raise WeightSyncError(
                Reason.APPLY_BUSY,
                "this engine receives weights from a trainer; try again when it has sent them",
                retry_after_s=1.0,
            )

    @contextlib.asynccontextmanager
    async def trainer(self, limit_s: float) -> AsyncIterator[None]:
        """Return in a trainer's turn, which ends with the block.

        Args:
            limit_s: How long what is under way may take, seconds.

        Raises:
            WeightSyncError: APPLY_BUSY: it takes longer.
        """
        until = clock.monotonic() + limit_s
        while self._busy():
            if clock.monotonic() > until:
                raise WeightSyncError(
                    Reason.APPLY_BUSY,
                    f"an apply of this engine is under way for over {limit_s:g} s; wait for it",
                    retry_after_s=1.0,
                )
            await asyncio.sleep(_LOOK_S)
        self.receiving = True
        try:
            try:
                await self._settle()
            except RuntimeError as error:
                raise WeightSyncError(Reason.APPLY_BUSY, str(error), retry_after_s=1.0) from error
            yield
        finally:
            self.receiving = False
