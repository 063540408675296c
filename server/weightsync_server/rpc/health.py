"""The standard health service (grpc.health.v1) and the names of what it tells about."""

from __future__ import annotations

import asyncio
from typing import Any

from grpc_health.v1 import health, health_pb2

from weightsync.errors import Reason, WeightSyncError

__all__ = ["PUSH", "SERVING", "Announcer", "HealthServicer", "PushHealth"]

#: `push` while pushes are accepted and the store has room, `serving` while the engine serves one
#: version.
PUSH, SERVING = "push", "serving"


class HealthServicer(health.aio.HealthServicer):
    """Tells of `push`, `serving` and the empty name, the server as a whole, and of nothing else."""

    async def Check(  # noqa: N802 - the name in the proto
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> Any:
        """Tell whether a service is serving.

        Raises:
            WeightSyncError: SERVICE_UNKNOWN.
        """
        if request.service not in ("", PUSH, SERVING):
            raise WeightSyncError(
                Reason.SERVICE_UNKNOWN,
                f"there is no health service {request.service[:64]!r}; ask about {PUSH!r} or "
                f"{SERVING!r}, or about no service, which stands for the server as a whole",
            )
        return await super().Check(request, context)


class Announcer:
    """Tells the health service of one name, and only when the answer changes."""

    def __init__(self, service: HealthServicer, name: str) -> None:
        self._service = service
        self._name = name
        self._announced: bool | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def tell(self, serving: bool) -> None:  # noqa: FBT001 - a callback with one value
        """Tell whether it is serving."""
        if serving == self._announced:
            return
        self._announced = serving
        status = health_pb2.HealthCheckResponse
        value = status.SERVING if serving else status.NOT_SERVING
        task = asyncio.ensure_future(self._service.set(self._name, value))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class PushHealth:
    """Tells that `push` is serving while pushes are let in and the store has room for them.

    Args:
        service: Is told.
    """

    def __init__(self, service: HealthServicer) -> None:
        self._announcer = Announcer(service, PUSH)
        self._open = False
        self._full = False

    def let_in(self) -> None:
        """Pushes are let in from now on."""
        self._open = True
        self._announcer.tell(not self._full)

    def fill(self, full: bool) -> None:  # noqa: FBT001 - a callback with one value
        """Take note of whether the store takes nothing more."""
        self._full = full
        self._announcer.tell(self._open and not full)
