"""The ingest processes: kept alive, named to callers; their streams are calls like any other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from pydantic import TypeAdapter

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync.wire.grpc_channels import is_loopback
from weightsync.wire.rpc_status import to_status
from weightsync.wire.socket_server import listen
from weightsync_server.auth import PUSH_WEIGHTS, RULES, Caller, Endpoint, Role
from weightsync_server.auth.admission import Auditor
from weightsync_server.auth.audit import noting
from weightsync_server.auth.caller import RejectedCall, UseCase
from weightsync_server.auth.principals import EVERYBODY, Principal
from weightsync_server.auth.roles import ListenerSettings
from weightsync_server.ingest.connection import Connection
from weightsync_server.ops import traces
from weightsync_server.ops.metrics import Metrics
from weightsync_server.push import is_here
from weightsync_server.workers.runtime.child_process import ChildGoneError, ChildProcess, Program
from weightsync_server.workers.runtime.process_pool import ProcessPool

if TYPE_CHECKING:
    from weightsync_server.settings import Settings


logger = logging.getLogger(__name__)


#: Seconds until the next try to take a connection when not even ending one was possible.
_AGAIN_S = 0.1


class StreamListener:
    """Takes connections of this server's own ingest processes and of nobody else.

    No other user may open the socket file `path`. `push` is guarded. `pids` are those of the
    processes; `kill` ends one.

    Raises:
        WeightSyncError: REQUEST_INVALID; the path is somebody else's or holds no socket.
    """

    def __init__(
        self,
        path: Path,
        push: UseCase,
        audit: Auditor,
        pids: Callable[[], Collection[int]],
        kill: Callable[[int], None],
    ) -> None:
        self._path = path
        self._push = push
        self._audit = audit
        self._pids = pids
        self._kill = kill
        self._listener = listen(path, 0o600, "choose another --run-dir")
        self._listener.setblocking(False)
        #: Given up for a moment when there is no other descriptor.
        self._spare: int | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept(), name="ingest-listener")

    async def close(self) -> None:
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
                logger.warning("process %d is not an ingest process of this server: refused", pid)
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
            cut = asyncio.create_task(connection.cut(), name="ingest-cut")
            try:
                await asyncio.wait([serving, cut], return_when=asyncio.FIRST_COMPLETED)
                serving.cancel()
                await asyncio.wait([serving])
            finally:
                cut.cancel()
                serving.cancel()
                outcome, _ = await asyncio.gather(serving, cut, return_exceptions=True)
                if isinstance(outcome, Exception):
                    logger.error("fault in a call of an ingest process", exc_info=outcome)
        except (OSError, EOFError, ValueError, KeyError) as error:
            logger.warning("an ingest process disconnected: %r", error)
        finally:
            await connection.close()

    async def _call(self, connection: Connection, call: dict[str, Any]) -> None:
        caller = _admitted(call)
        traces.take_over(call["traceparent"])
        try:
            with noting(self._audit, caller):
                try:
                    answer = await self._push(caller, connection)
                finally:
                    caller.request = getattr(connection.first, "begin", connection.first)
        except WeightSyncError as error:
            connection.done(_document(to_status(error)))
        else:
            connection.done({"code": 0}, answer.SerializeToString())


def _document(status: grpc.Status) -> dict[str, Any]:
    return {
        "code": status.code.value[0],
        "details": status.details,
        "trailers": [
            (key, value.hex())
            for key, value in status.trailing_metadata
            if isinstance(value, bytes)
        ],
    }


def _admitted(call: dict[str, Any]) -> Caller:
    principal = EVERYBODY
    if not call["everybody"]:
        roles = frozenset(Role(role) for role in call["roles"])
        principal = Principal(call["name"], roles, frozenset(call["models"]))
    caller = Caller(principal, PUSH_WEIGHTS, RULES[PUSH_WEIGHTS], call["peer"])
    if call["left_s"] is not None:
        caller.deadline = clock.monotonic() + call["left_s"]
    return caller


def _pid(sock: socket.socket) -> int:
    size = struct.calcsize("3i")
    pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(pid)


_PROGRAM = Program("ingest", "weightsync_server.ingest.ingest_main")
#: Seconds from the start of a process until it listens, several of which may start on one core.
_READY_S = 60.0
_HEARTBEAT_S = 10.0
#: Seconds on top of a drain until a process that does not tell its end is given up.
_DRAIN_S = 5.0


class IngestPool(ProcessPool):
    """Keeps `--ingest` processes that serve PushWeights; with 0 it does nothing."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        super().__init__(
            _PROGRAM, settings.ingest, ready_timeout_s=_READY_S, heartbeat_s=_HEARTBEAT_S
        )
        self._settings = settings
        self._metrics = metrics
        self._audit: Auditor | None = None
        self._listener: StreamListener | None = None

    async def serve(self, push: UseCase, audit: Auditor) -> None:
        """Return when every process listens; none is left running where one cannot.

        `push` serves PushWeights and is guarded; `audit` gets every call.
        """
        if not self._count:
            return
        self._audit = audit
        self._listener = StreamListener(
            self._settings.paths.ingest_socket, push, audit, lambda: self.pids, self._kill
        )
        await self.start()

    def endpoints(self, caller: Caller) -> list[str]:
        """Return where a caller may open PushWeights streams: on sockets, or on ports, as it came.

        A port has no host: it is that which the caller dialled.
        """
        found = []
        for process in self._members:
            endpoints = [Endpoint.parse(text) for text in process.ready["endpoints"]]
            mine = [one for one in endpoints if _may_have_dialled(one, caller)]
            found += [_advertised(one) for one in mine[:1]]
        return found

    async def drain(self, grace_s: float) -> None:
        """Let no stream in any more; those under way get so many seconds to end."""
        request = {"op": "drain", "grace_s": grace_s}
        asked = [process.call(request, (), grace_s + _DRAIN_S) for process in list(self._members)]
        for outcome in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, ChildGoneError):
                raise outcome

    async def close(self) -> None:
        await self.stop()
        if self._listener is not None:
            await self._listener.close()

    def _facts(self, place: int) -> Mapping[str, Any]:
        settings = self._settings
        doors = settings.listeners
        own = replace(doors, listen=[str(endpoint) for endpoint in doors.of_ingest(place)])
        return {
            "model": settings.name,
            "listeners": TypeAdapter(ListenerSettings).dump_python(own, mode="json"),
            "socket": str(settings.paths.ingest_socket),
        }

    def _lanes(self, process: ChildProcess) -> Sequence[Coroutine[Any, Any, None]]:
        return [self._let_in(process)]

    async def _let_in(self, process: ChildProcess) -> None:
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


def _may_have_dialled(endpoint: Endpoint, caller: Caller) -> bool:
    """Whether a caller can have come in at the door beside which an endpoint is."""
    if caller.peer.startswith("unix:"):
        return endpoint.is_socket and endpoint.role is caller.listener_role
    host = endpoint.address.rpartition(":")[0]
    return not endpoint.is_socket and (is_here(caller.peer) or not is_loopback(host))


def _advertised(endpoint: Endpoint) -> str:
    if endpoint.is_socket:
        return endpoint.address
    # The name that the caller knows this host by is the one that a certificate must hold.
    return f":{endpoint.address.rpartition(':')[2]}"
