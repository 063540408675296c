"""The call that makes this server the owner of an engine, open as long as the process lives."""

from __future__ import annotations

import asyncio
import math
import os
from typing import TYPE_CHECKING, Any, Never

import grpc

from weightsync import clock
from weightsync.engine.owner import OWNER_PID, owned_by
from weightsync.engine.v1 import engine_pb2 as pb
from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["Ownership", "understood"]

#: How long an engine that has restarted is left to the server that had it before, seconds.
_TURN_S = 5.0


class Ownership:
    """Owns an engine from `take` on, until `close`, or until the connection to it breaks.

    Args:
        stub: Of the bridge.
        server_id: Names this process in every call.
        run_dir: Whoever is refused is told it; None: unknown.
        refuse: Raises what a failed call means.

    Attributes:
        known: Whether the bridge knows owners; one of an older release obeys who says hello last.
    """

    def __init__(
        self,
        stub: Any,
        server_id: str,
        run_dir: Path | None,
        refuse: Callable[[grpc.aio.AioRpcError], Never],
    ) -> None:
        self.known = False
        self._stub = stub
        folder = "" if run_dir is None else os.fsencode(run_dir.absolute()).decode(errors="replace")
        self._owner = pb.Owner(server_id=server_id, pid=os.getpid(), run_dir=folder)
        self._refuse = refuse
        self._call: Any = None
        #: Start of the engine that another server had, and until when that has the first turn.
        self._others, self._turn_ends = "", 0.0

    async def take(self, seconds: float) -> None:
        """Return when this server owns the engine, or the bridge knows no owners.

        Args:
            seconds: Longest wait for an answer.

        Raises:
            WeightSyncError: ENGINE_OWNED: another server does. ENGINE_AWAY: nobody answers.
        """
        if self._call is not None and not self._call.done():
            return
        call = self._stub.Own(pb.OwnRequest(owner=self._owner))
        try:
            async with asyncio.timeout(seconds):
                answer = await call.read()
        except grpc.aio.AioRpcError as error:
            self.known = False
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                self._refuse(error)
            return
        except TimeoutError:
            answer = grpc.aio.EOF
        if answer is grpc.aio.EOF:
            call.cancel()
            raise WeightSyncError(
                Reason.ENGINE_AWAY, "vLLM does not answer who owns it; look at its log"
            )
        self._call, self.known = call, True

    def check(self, owner: pb.Owner, engine_id: str) -> None:
        """Refuse an engine that another server owns, or owned before the engine restarted.

        Args:
            owner: Of the engine; empty: none.
            engine_id: Of this start of it.

        Raises:
            WeightSyncError: ENGINE_OWNED. ENGINE_AWAY: the other has the first turn.
        """
        if owner.server_id and owner.server_id != self._owner.server_id:
            self._others, self._turn_ends = engine_id, math.inf
            raise WeightSyncError(
                Reason.ENGINE_OWNED, owned_by(owner), metadata={OWNER_PID: str(owner.pid)}
            )
        if not self._others or self._others == engine_id:
            # It has died, or this server has the engine.
            self._others = ""
            return
        now = clock.monotonic()
        self._turn_ends = min(self._turn_ends, now + _TURN_S)
        if now < self._turn_ends:
            raise WeightSyncError(
                Reason.ENGINE_AWAY,
                f"the engine has restarted; for {_TURN_S:g} s it is left to the weightsync-server "
                "that had it before",
                retry_after_s=1.0,
            )
        self._others = ""

    def close(self) -> None:
        """Own it no longer."""
        if self._call is not None:
            self._call.cancel()
            self._call = None


def understood(refusal: WeightSyncError) -> WeightSyncError:
    """Return what the bridge has refused, as this release calls it.

    Servers of older releases, which the bridge refuses too, know no ENGINE_OWNED.
    """
    if refusal.reason is Reason.ENGINE_REFUSED and OWNER_PID in refusal.metadata:
        return WeightSyncError(Reason.ENGINE_OWNED, refusal.message, metadata=refusal.metadata)
    return refusal
