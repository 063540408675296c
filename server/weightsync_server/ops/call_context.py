"""What the handlers of a call need of gRPC's context, for calls that come in by another way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from weightsync import clock

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CallContext"]


class CallContext:
    """Stands for `grpc.aio.ServicerContext` in one call.

    Args:
        peer: Address of the other end, in the form of gRPC.
        left_s: Seconds left to the call; None: it has no deadline.

    Attributes:
        status: With what it was aborted; None: it was not.
    """

    def __init__(self, peer: str, left_s: float | None = None) -> None:
        self._peer = peer
        self._end = None if left_s is None else clock.monotonic() + left_s
        self.status: grpc.Status | None = None

    def peer(self) -> str:
        """Return the address of the other end."""
        return self._peer

    def time_remaining(self) -> float | None:
        """Return the seconds left to the call, if it has a deadline."""
        return None if self._end is None else max(0.0, self._end - clock.monotonic())

    def cancelled(self) -> bool:
        """Return whether the caller has left: that cancels the task of the call instead."""
        return False

    def code(self) -> grpc.StatusCode:
        """Return how the call ended."""
        return grpc.StatusCode.OK if self.status is None else self.status.code

    def trailing_metadata(self) -> Sequence[tuple[str, Any]]:
        """Return what was told at the end, as a failed call of a client has it."""
        return () if self.status is None else tuple(self.status.trailing_metadata)

    async def abort_with_status(self, status: grpc.Status) -> None:
        """End the call.

        Raises:
            AbortError: Always.
        """
        self.status = status
        raise grpc.aio.AbortError
