"""Where ingest processes bring their streams: each becomes a call like any other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from weightsync.wire.fd_passing import listen
from weightsync_server.auth import CALLER, PUSH_WEIGHTS, RULES, Caller, Role
from weightsync_server.auth.auth_interceptor import noting
from weightsync_server.auth.principals import EVERYBODY, Principal
from weightsync_server.ingest.connection import Connection
from weightsync_server.ops.call_context import CallContext

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection
    from pathlib import Path

    from weightsync_server.auth.auth_interceptor import Auditor

__all__ = ["StreamListener"]

logger = logging.getLogger(__name__)

#: Seconds until the next try to take a connection when not even ending one was possible.
_AGAIN_S = 0.1


class StreamListener:
    """Takes connections of this server's own ingest processes and of nobody else.

    Args:
        path: Socket file; nobody but this user may open it.
        serve: What serves PushWeights, every interceptor but the first included.
        audit: Told of every end.
        pids: The ingest processes.
        kill: Ends one.

    Raises:
        WeightSyncError: REQUEST_INVALID; the path is somebody else's or holds no socket.
        OSError: It cannot be bound.
    """

    def __init__(
        self,
        path: Path,
        serve: Callable[[Any, Any], Awaitable[Any]],
        audit: Auditor,
        pids: Callable[[], Collection[int]],
        kill: Callable[[int], None],
    ) -> None:
        self._path = path
        self._serve = serve
        self._audit = audit
        self._pids = pids
        self._kill = kill
        self._listener = listen(path, 0o600, "choose another --run-dir")
        self._listener.setblocking(False)
        #: Given up for a moment when there is no other descriptor.
        self._spare: int | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept(), name="ingest-desk")

    async def close(self) -> None:
        """Stop listening and end every call."""
        self._path.unlink(missing_ok=True)
        for task in (self._accepting, *self._calls):
            task.cancel()
        await asyncio.gather(self._accepting, *self._calls, return_exceptions=True)
        self._listener.close()
        self._give_spare()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._take_spare()
            try:
                sock, _ = await loop.sock_accept(self._listener)
                pid = _pid(sock)
            except OSError as error:
                logger.warning("an ingest process could not be answered: %s", error.strerror)
                await self._turn_away()
                continue
            if pid not in self._pids():
                logger.warning("process %d is none of the ingest processes: refused", pid)
                sock.close()
                continue
            task = asyncio.create_task(self._attend(sock, pid), name="ingest-call")
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    async def _turn_away(self) -> None:
        """Without a descriptor for it, end the next connection: else it would wait for one."""
        self._give_spare()
        try:
            sock, _ = self._listener.accept()
            sock.close()
        except OSError:
            await asyncio.sleep(_AGAIN_S)

    def _take_spare(self) -> None:
        if self._spare is None:
            # Somebody else may have taken what was free for a moment: then at the next turn.
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _give_spare(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    async def _attend(self, sock: socket.socket, pid: int) -> None:
        connection = Connection(sock, partial(self._kill, pid))
        try:
            call = await connection.open()
            serving = asyncio.create_task(self._call(connection, call), name="ingest-serving")
            connection.on_cut = serving.cancel
            try:
                await asyncio.wait([serving])
            finally:
                serving.cancel()
                (outcome,) = await asyncio.gather(serving, return_exceptions=True)
                if isinstance(outcome, Exception):
                    logger.error("fault in a call of an ingest process", exc_info=outcome)
        except (OSError, EOFError, ValueError, KeyError) as error:
            logger.warning("an ingest process broke off: %r", error)
        finally:
            await connection.close()

    async def _call(self, connection: Connection, call: dict[str, Any]) -> None:
        caller = Caller(_principal(call), PUSH_WEIGHTS, RULES[PUSH_WEIGHTS], call["peer"])
        CALLER.set(caller)
        context = CallContext(caller.peer, call["left_s"])
        response = b""
        try:
            with noting(self._audit, caller, context):
                try:
                    answer = await self._serve(connection, context)
                finally:
                    caller.request = getattr(connection.first, "begin", connection.first)
            response = answer.SerializeToString()
        except grpc.aio.AbortError:
            pass
        connection.done(_document(context.status), response)


def _document(status: grpc.Status | None) -> dict[str, Any]:
    """Return what an ingest process is told of the end of a call."""
    if status is None:
        return {"code": 0}
    return {
        "code": status.code.value[0],
        "details": status.details,
        "trailers": [
            (key, value.hex())
            for key, value in status.trailing_metadata
            if isinstance(value, bytes)
        ],
    }


def _principal(call: dict[str, Any]) -> Principal:
    if call["everybody"]:
        return EVERYBODY
    roles = frozenset(Role(role) for role in call["roles"])
    return Principal(call["name"], roles, frozenset(call["models"]))


def _pid(sock: socket.socket) -> int:
    size = struct.calcsize("3i")
    pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(pid)
