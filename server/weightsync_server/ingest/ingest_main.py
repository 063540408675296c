"""An ingest process: `python -m weightsync_server.ingest.ingest_main FD`."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from typing import TYPE_CHECKING, Any

import grpc
from prometheus_client import CollectorRegistry

from weightsync.errors import Reason, WeightSyncError
from weightsync.wire import child_end, frames
from weightsync_server.auth import CALLER, PUSH_WEIGHTS
from weightsync_server.auth.listeners import Listeners
from weightsync_server.auth.principals import EVERYBODY
from weightsync_server.ingest.notices import Notices
from weightsync_server.ingest.relay import Relay, take
from weightsync_server.ops.process_tuning import tune_process
from weightsync_server.rpc.status_interceptor import GuardInterceptor, RpcMetrics
from weightsync_server.settings import Settings
from weightsync_server.workers.runtime.mappings import Maps

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from weightsync_server.auth.caller import Caller, RejectedCall

__all__ = ["main"]

logger = logging.getLogger(__name__)


class _Ingest:
    """Serves PushWeights until the server is gone.

    Args:
        sock: To the server.
        start: What it told.
    """

    def __init__(self, sock: socket.socket, start: dict[str, Any]) -> None:
        self._sock = sock
        self._path: str = start["socket"]
        self._settings = Settings(**start["settings"])
        self._maps = Maps()
        self._notices = Notices()
        self._doors: Listeners
        self._watch: asyncio.Task[None] | None = None
        self._draining: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Listen, say so, then do as the server tells: first of all, let callers in.

        Raises:
            EOFError: The server is gone.
        """
        try:
            ready = {"op": "ready", "endpoints": self._listen()}
        except (WeightSyncError, OSError, RuntimeError) as error:
            reason = error.reason if isinstance(error, WeightSyncError) else Reason.REQUEST_INVALID
            message = f"an ingest process cannot listen: {error}"
            self._sock.sendall(frames.encode({"op": "failed", "reason": reason, "error": message}))
            raise EOFError from error
        self._sock.sendall(frames.encode(ready))
        self._sock.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=self._sock)
        self._notices.begin(writer)
        while True:
            request, _ = await frames.read(reader)
            if request["op"] == "drain":
                task = asyncio.create_task(self._drain(request))
                self._draining.add(task)
                continue
            if request["op"] == "open":
                await self._open()
            else:
                for name in request["forget"]:
                    self._maps.forget(name)
            self._notices.answer({"id": request["id"]})

    async def push(self, requests: AsyncIterator[Any], context: Any) -> bytes:
        """Serve one stream."""
        caller = CALLER.get()
        if caller is None:
            raise WeightSyncError(Reason.PERMISSION_DENIED, "nobody answers for this call")
        relay = await Relay.connect(self._path, self._maps)
        done = await relay.run(_call(caller, context.time_remaining()), requests)
        if done.status["code"]:
            encoded = done.status["trailers"]
            trailers = tuple((key, bytes.fromhex(value)) for key, value in encoded)
            await context.abort(_CODES[done.status["code"]], done.status["details"], trailers)
        return done.response

    def _listen(self) -> list[str]:
        self._doors = Listeners(self._settings.listener_options)
        guard = GuardInterceptor(RpcMetrics(CollectorRegistry()), self._notices.fault)
        bound = self._doors.bind(_Report(self._notices), [guard], self._add)
        return [str(endpoint) for endpoint in bound]

    async def _open(self) -> None:
        # Who has connected before this has waited. The server takes streams of no process that it
        # does not know yet, nor has that forget segments.
        if not self._draining:
            await self._doors.start()
            self._watch = asyncio.create_task(self._end_when_shut())

    def _add(self, server: grpc.aio.Server) -> None:
        # The response is bytes already; the server's process made it.
        handler: Any = grpc.stream_unary_rpc_method_handler(self.push, take, None)
        _, service, method = PUSH_WEIGHTS.split("/")
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )

    async def _end_when_shut(self) -> None:
        why = await self._doors.shut()
        logger.critical("nobody can connect any more (%s): ending, to be started again", why)
        os._exit(1)

    async def _drain(self, request: dict[str, Any]) -> None:
        if self._watch is not None:
            self._watch.cancel()
        await self._doors.close(request["grace_s"])
        self._notices.answer({"id": request["id"]})


class _Report:
    """Tells the server's process what it counts and writes down; see `Auditor`."""

    def __init__(self, notices: Notices) -> None:
        self._notices = notices

    def refuse(self, error: WeightSyncError, attempt: RejectedCall, times: int = 1) -> None:
        """A call was refused at the door."""
        self._notices.refuse(error, attempt, times)

    def write(self, caller: Caller, outcome: str) -> None:
        """A call has ended: the server's process writes that down itself."""


_CODES = {code.value[0]: code for code in grpc.StatusCode}


def _call(caller: Caller, left_s: float | None) -> dict[str, Any]:
    principal = caller.principal
    return {
        "op": "call",
        "everybody": principal is EVERYBODY,
        "name": principal.name,
        "roles": sorted(principal.roles),
        "models": sorted(principal.models),
        "peer": caller.peer,
        "left_s": left_s,
    }


def main() -> None:
    """Serve until the server is gone, whose socket's descriptor is the only argument."""
    sock = child_end.connect()
    try:
        start = child_end.begin(sock)
        ingest = _Ingest(sock, start)
        logging.basicConfig(
            level=start["settings"]["log_level"].upper(),
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        )
        tune_process()
        asyncio.run(ingest.run())
    except (EOFError, ConnectionError):
        # At once, also in the middle of a stream: nobody waits for it.
        os._exit(0)


if __name__ == "__main__":
    main()
