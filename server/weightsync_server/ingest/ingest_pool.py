"""The ingest processes: kept alive, named to callers, given back at the end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

from weightsync.errors import Reason, WeightSyncError
from weightsync.wire.addresses import is_loopback
from weightsync_server.auth import CALLER, PUSH_WEIGHTS, Endpoint
from weightsync_server.auth.caller import RejectedCall
from weightsync_server.ingest.stream_listener import StreamListener
from weightsync_server.ops.method_handlers import through
from weightsync_server.push import is_here
from weightsync_server.workers.runtime.child_process import Gone, Program
from weightsync_server.workers.runtime.process_pool import ProcessPool

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence

    from weightsync.v1 import weightsync_pb2_grpc
    from weightsync_server.auth import Role
    from weightsync_server.auth.auth_interceptor import Auditor
    from weightsync_server.ops.metrics import Metrics
    from weightsync_server.settings import Settings
    from weightsync_server.workers.runtime.child_process import ChildProcess

__all__ = ["IngestPool"]

_PROGRAM = Program("ingest", "weightsync_server.ingest.ingest_main")
#: Seconds from the start of a process until it listens, several of which may start on one core.
_READY_S = 60.0
_HEARTBEAT_S = 10.0
#: Seconds on top of a drain until a process that does not tell its end is given up.
_DRAIN_S = 5.0


class IngestPool(ProcessPool):
    """Keeps `--ingest` processes that serve PushWeights; with 0 it does nothing.

    Args:
        settings: Those of the server, by which the processes are made as its own doors are.
        metrics: Where restarts and what is refused are counted.
    """

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        super().__init__(
            _PROGRAM, settings.ingest, ready_timeout_s=_READY_S, heartbeat_s=_HEARTBEAT_S
        )
        self._settings = settings
        self._metrics = metrics
        self._audit: Auditor | None = None
        self._desk: StreamListener | None = None

    async def serve(
        self,
        servicer: weightsync_pb2_grpc.WeightSyncServicer,
        audit: Auditor,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
    ) -> None:
        """Return when every process listens.

        Args:
            servicer: Serves PushWeights.
            audit: Told of every call, as of those to the server's own doors.
            interceptors: Those that come after authority.

        Raises:
            WeightSyncError: A process cannot start or listen; none is left running.
        """
        if not self._count:
            return
        self._audit = audit
        pushing: Any = grpc.stream_unary_rpc_method_handler(servicer.PushWeights)
        handler = await through(interceptors, pushing, PUSH_WEIGHTS)
        self._desk = StreamListener(
            self._settings.ingest_socket, handler.stream_unary, audit, lambda: self.pids, self._kill
        )
        await self.start()

    def endpoints(self, peer: str) -> list[str]:
        """Return where a caller may open PushWeights streams: on sockets, or on ports, as it came.

        Args:
            peer: Who asks, as gRPC tells it. A port stands without a host: that which it dialled.
        """
        caller = CALLER.get()
        door = caller.door if caller is not None else None
        found = []
        for process in self._members:
            endpoints = [Endpoint.parse(text) for text in process.ready["endpoints"]]
            mine = [one for one in endpoints if _may_have_dialled(one, peer, door)]
            found += [_advertised(one) for one in mine[:1]]
        return found

    async def drain(self, grace_s: float) -> None:
        """Let no stream in any more; those under way get so many seconds to end."""
        request = {"op": "drain", "grace_s": grace_s}
        asked = [process.call(request, (), grace_s + _DRAIN_S) for process in list(self._members)]
        for outcome in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, Gone):
                raise outcome

    async def close(self) -> None:
        """End every process and its streams."""
        await self.stop()
        if self._desk is not None:
            await self._desk.close()

    def _facts(self, place: int) -> Mapping[str, Any]:
        settings = self._settings
        mine = settings.model_dump(mode="json") | {
            "listen": [str(endpoint) for endpoint in settings.data_endpoints(place)],
            "ingest": 0,
        }
        return {"settings": mine, "socket": str(settings.ingest_socket)}

    def _lanes(self, process: ChildProcess) -> Sequence[Coroutine[Any, Any, None]]:
        return [self._let_in(process)]

    async def _let_in(self, process: ChildProcess) -> None:
        """Have a process serve callers, now that the desk knows it."""
        await process.call({"op": "open"}, (), _READY_S)
        await process.watch()

    def _heard(self, notice: dict[str, Any]) -> None:
        if notice["op"] == "refused" and self._audit is not None:
            error = WeightSyncError(Reason(notice["reason"]), notice["message"])
            self._audit.refuse(error, RejectedCall(*notice["attempt"]), notice["times"])
        elif notice["op"] == "fault":
            self._metrics.violate("only_data")
        else:
            super()._heard(notice)

    def _lost(self) -> None:
        self._metrics.count_ingest_restart()

    def _kill(self, pid: int) -> None:
        for process in self._members:
            if process.pid == pid:
                process.kill()


def _may_have_dialled(endpoint: Endpoint, peer: str, door: Role | None) -> bool:
    """Return whether a caller can have come in at the door beside which an endpoint is."""
    if peer.startswith("unix:"):
        return endpoint.is_socket and endpoint.role is door
    host = endpoint.address.rpartition(":")[0]
    return not endpoint.is_socket and (is_here(peer) or not is_loopback(host))


def _advertised(endpoint: Endpoint) -> str:
    if endpoint.is_socket:
        return endpoint.address
    # The name that the caller knows this host by is the one that a certificate must hold.
    return f":{endpoint.address.rpartition(':')[2]}"
