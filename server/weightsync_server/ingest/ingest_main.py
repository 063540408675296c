"""An ingest process: `python -m weightsync_server.ingest.ingest_main FD`."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
from prometheus_client import CollectorRegistry
from pydantic import TypeAdapter

from weightsync.errors import Reason, WeightSyncError
from weightsync.wire import child_channel
from weightsync_server.auth import PUSH_WEIGHTS, ListenerSettings
from weightsync_server.auth.caller import Caller
from weightsync_server.auth.listeners import Listeners
from weightsync_server.auth.principals import EVERYBODY
from weightsync_server.ingest.connection import Notices
from weightsync_server.ingest.relay import Relay, take
from weightsync_server.ops import traces
from weightsync_server.ops.process_tuning import tune_process
from weightsync_server.rpc.status_interceptor import GuardInterceptor
from weightsync_server.usecases.guard import CallGuard, RpcMetrics
from weightsync_server.workers.runtime.mappings import Maps

logger = logging.getLogger(__name__)


class _Ingest:
    """Serves PushWeights until the server, at the other end of `sock`, is gone."""

    def __init__(self, sock: socket.socket, start: dict[str, Any]) -> None:
        self._sock = sock
        self._path: str = start["socket"]
        self._model: str = start["model"]
        self._listeners = TypeAdapter(ListenerSettings).validate_python(start["listeners"])
        self._maps = Maps()
        self._notices = Notices()
        self._doors: Listeners
        self._watch: asyncio.Task[None] | None = None
        self._draining: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Listen, say so, then do as the server tells.

        Raises EOFError when the server is gone.
        """
        try:
            ready = {"op": "ready", "endpoints": self._listen()}
        except (WeightSyncError, OSError, RuntimeError) as error:
            reason = error.reason if isinstance(error, WeightSyncError) else Reason.REQUEST_INVALID
            message = f"an ingest process cannot listen: {error}"
            self._sock.sendall(
                child_channel.encode({"op": "failed", "reason": reason, "error": message})
            )
            raise EOFError from error
        self._sock.sendall(child_channel.encode(ready))
        self._sock.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=self._sock)
        self._notices.begin(writer)
        while True:
            request, _ = await child_channel.read(reader)
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
        relay = await Relay.connect(self._path, self._maps)
        done = await relay.run(_call(context.caller), requests)
        if done.status["code"]:
            encoded = done.status["trailers"]
            trailers = tuple((key, bytes.fromhex(value)) for key, value in encoded)
            await context.abort(_CODES[done.status["code"]], done.status["details"], trailers)
        return done.response

    def _listen(self) -> list[str]:
        self._doors = Listeners(self._model, self._listeners)
        guard = CallGuard(RpcMetrics(CollectorRegistry()), self._notices.fault)
        bound = self._doors.bind(self._notices, [GuardInterceptor(guard)], self._add)
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
        logger.critical("no client can connect any more (%s): exiting, to be restarted", why)
        os._exit(1)

    async def _drain(self, request: dict[str, Any]) -> None:
        if self._watch is not None:
            self._watch.cancel()
        await self._doors.close(request["grace_s"])
        self._notices.answer({"id": request["id"]})


_CODES = {code.value[0]: code for code in grpc.StatusCode}


def _call(caller: Caller) -> dict[str, Any]:
    principal = caller.principal
    return {
        "op": "call",
        "everybody": principal is EVERYBODY,
        "name": principal.name,
        "roles": sorted(principal.roles),
        "models": sorted(principal.models),
        "peer": caller.peer,
        "left_s": caller.left_s(),
        "traceparent": traces.caller(),
    }


def main() -> None:
    sock = child_channel.connect()
    try:
        start = child_channel.begin(sock)
        ingest = _Ingest(sock, start)
        tune_process()
        asyncio.run(ingest.run())
    except (EOFError, ConnectionError):
        # At once, also in the middle of a stream: nobody waits for it.
        os._exit(0)


if __name__ == "__main__":
    main()
