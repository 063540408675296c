"""Which server owns the engine: one at a time, for as long as it lives."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from weightsync.engine.owner import MAX_RUN_DIR_BYTES, OWNER_PID, owned_by
from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from weightsync.engine.v1 import engine_pb2 as pb

__all__ = ["EngineOwner"]

logger = logging.getLogger(__name__)

#: How long a newcomer waits for an owner that is about to leave, as when one restarts, seconds.
_LEAVES_S = 0.5
_MAX_ID_BYTES = 64


class EngineOwner:
    """An owner that lives keeps its engine; one that has died is replaced at once.

    The kernel ends the call that an owner keeps open when its process ends, whatever ended that. A
    process that stands still lives, and keeps the engine.

    Attributes:
        present: The owner; None: there is none.
    """

    def __init__(self) -> None:
        self.present: pb.Owner | None = None
        self._left = asyncio.Event()

    async def take(self, owner: pb.Owner) -> None:
        """Make a server the owner, until `leave`; its own call before, if any, counts no more.

        Raises:
            WeightSyncError: REQUEST_INVALID; ENGINE_REFUSED: another one owns the engine.
        """
        if not 0 < len(owner.server_id.encode()) <= _MAX_ID_BYTES:
            raise _invalid(f"server_id has 1 to {_MAX_ID_BYTES} bytes")
        if len(owner.run_dir.encode()) > MAX_RUN_DIR_BYTES:
            raise _invalid(f"run_dir has at most {MAX_RUN_DIR_BYTES} bytes")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVES_S):
                while self._other(owner.server_id) is not None:
                    await self._left.wait()
        self.check(owner.server_id)
        self.present = owner
        self._left = asyncio.Event()
        logger.info(
            "weightsync: the server with pid %d and run_dir %r owns this engine",
            owner.pid,
            owner.run_dir,
        )

    def leave(self, owner: pb.Owner) -> bool:
        """Take note that a call of an owner has ended; returns whether it was the present one."""
        if self.present is not owner:
            return False
        self.present = None
        self._left.set()
        return True

    def check(self, server_id: str) -> None:
        """Refuse a server while another one owns the engine.

        Raises:
            WeightSyncError: ENGINE_REFUSED, naming the owner.
        """
        if other := self._other(server_id):
            raise WeightSyncError(
                Reason.ENGINE_REFUSED, owned_by(other), metadata={OWNER_PID: str(other.pid)}
            )

    def _other(self, server_id: str) -> pb.Owner | None:
        return None if self.present is None or self.present.server_id == server_id else self.present


def _invalid(what: str) -> WeightSyncError:
    return WeightSyncError(Reason.REQUEST_INVALID, f"no owner: {what}")
