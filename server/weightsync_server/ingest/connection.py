"""The server's end of one stream of an ingest process, and the notices on it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from weightsync.errors import Reason, WeightSyncError
from weightsync.wire import child_channel
from weightsync.wire.child_channel import noted
from weightsync.wire.documents import refusal_of
from weightsync_server.auth.auth_interceptor import reader
from weightsync_server.auth.caller import Caller, RejectedCall
from weightsync_server.push import Claim, Grant, Message, RemoteStream, Written, read_message

logger = logging.getLogger(__name__)


#: Messages that wait here; the others wait in the process.
_AHEAD = 4
#: Seconds in which a process tells who calls, and in which it stops writing when it is told to.
_CALL_S = 10.0
_STOP_S = 5.0
_DISCARD_BYTES = 64 << 10
#: Seconds that what has come from a stream which was cut is waited for to be counted.
_REST_S = 1.0


_read: Callable[[bytes], Message] = reader(read_message)


class Connection(RemoteStream):
    """What an ingest process sends, in order, and what it is told.

    `kill` ends the process, and with it all of its streams. `first` is the first message of the
    stream, once it has come.
    """

    def __init__(self, sock: socket.socket, kill: Callable[[], None]) -> None:
        self.first: Message | None = None
        self._sock = sock
        self._kill = kill
        self._frames: asyncio.Queue[tuple[dict[str, Any], bytes] | None] = asyncio.Queue(_AHEAD)
        self._gone, self._cut = asyncio.Event(), asyncio.Event()
        self._whole = self._ceased = self._taken = False
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def open(self) -> dict[str, Any]:
        """Return who calls; OSError, EOFError, ValueError or TimeoutError: nobody does."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._sock)
        async with asyncio.timeout(_CALL_S):
            call, _ = await child_channel.read(reader)
        self._send({"op": "heard"})
        self._reading = asyncio.create_task(self._read(reader), name="ingest-stream")
        return call

    def __aiter__(self) -> Connection:
        return self

    async def __anext__(self) -> Message | Claim | Written:
        """Return what comes next, until the stream ends or the process is told to stop.

        Raises WeightSyncError when what comes is no message, or the system or authority refused the
        process something.
        """
        if self._taken:
            self._taken = False
            self._frames.task_done()
        frame = None if self._ceased else await self._frames.get()
        if frame is None or self._ceased:
            raise StopAsyncIteration
        self._taken = True
        document, blob = frame
        op = document["op"]
        if op == "wrote":
            return Written(document["shard"], document["end"], document["due"])
        if op == "claim":
            return Claim(document["shard"])
        if op == "message":
            message = _read(blob)
            self.first = self.first or message
            return message
        if op == "end":
            raise StopAsyncIteration
        if op == "failed":
            raise refusal_of(document)
        raise WeightSyncError(
            Reason.FAULT, f"an ingest process sent {str(op)[:50]!r}; report this fault"
        )

    def grant(self, grant: Grant) -> None:
        segment = grant.segment
        document: dict[str, Any] = {
            "op": "grant",
            "segment": [segment.id, segment.capacity],
            "received": grant.received,
            "size": grant.size,
            "mark": grant.mark,
            "most": grant.most,
        }
        with contextlib.ExitStack() as stack:
            fds = [segment.fd]
            if grant.spans:
                document["boxes"] = True
                # There may be more of them than a socket takes.
                fds.append(stack.enter_context(noted({"spans": grant.spans})))
            self._send(document, fds=fds)

    def go_on(self, mark: int) -> None:
        self._send({"op": "mark", "mark": mark})

    async def cease(self) -> None:
        """Return when the process writes no more for this stream: it says so, or it is killed."""
        if not self._ceased:
            self._ceased = True
            while not self._frames.empty():
                self._frames.get_nowait()
            # Whoever waits for the next message learns that there is none.
            self._frames.put_nowait(None)
            self._send({"op": "stop"})
        try:
            async with asyncio.timeout(_STOP_S):
                await self._gone.wait()
        except TimeoutError:
            logger.warning("an ingest process did not stop within %g s: killed", _STOP_S)
            self._kill()
            await self._gone.wait()

    def done(self, document: dict[str, Any], response: bytes = b"") -> None:
        self._send({"op": "done", **document}, response)

    async def cut(self) -> None:
        """Return when the process, or its caller, has left in the midst of the stream."""
        await self._cut.wait()

    async def close(self) -> None:
        if self._reading is not None:
            await self.cease()
            self._reading.cancel()
        await child_channel.hang_up(self._writer, self._sock)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            await self._take(reader)
        except (OSError, EOFError):
            pass
        except Exception:
            logger.exception("an ingest process sent an invalid message: killed")
            self._kill()
            # It may write until the kernel has ended it, and with it the connection.
            with contextlib.suppress(OSError):
                while await reader.read(_DISCARD_BYTES):
                    pass
        self._gone.set()
        if not self._whole and not self._ceased:
            # What has come counts, unless whoever takes it waits for something else.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REST_S):
                    await self._frames.join()
            self._cut.set()

    async def _take(self, reader: asyncio.StreamReader) -> None:
        while True:
            frame = await child_channel.read(reader)
            self._whole = self._whole or frame[0]["op"] == "end"
            if not self._ceased:
                await self._frames.put(frame)

    def _send(self, document: dict[str, Any], blob: bytes = b"", fds: Sequence[int] = ()) -> None:
        # Past the transport, which cannot send descriptors and never writes by itself. What is told
        # is small and little, so a full socket means a stuck process.
        data = child_channel.encode(document, blob)
        try:
            sent = socket.send_fds(self._sock, [data], list(fds))
        except BlockingIOError:
            sent = 0
        except OSError:
            # It is gone.
            return
        if sent != len(data):
            logger.warning("an ingest process did not start listening: killed")
            self._kill()


#: Seconds for which what happens is summed up before it is told.
_SUM_S = 0.1
#: Refusals that are told apart in one sum; what comes on top is told without its sentence.
_MOST = 32


class Notices:
    """Tells sums, so that however many calls are refused, little is sent, and nothing is lost.

    It is the `Auditor` of an ingest process.
    """

    def __init__(self) -> None:
        self._refused: Counter[tuple[str, str, RejectedCall]] = Counter()
        self._fault = False
        self._writer: asyncio.StreamWriter | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, writer: asyncio.StreamWriter) -> None:
        """Start telling; the server knows that the process is ready."""
        self._writer = writer
        self._later()

    def refuse(self, error: WeightSyncError, attempt: RejectedCall, times: int = 1) -> None:
        # Strangers are only counted: their addresses must not take the place of principals.
        known = attempt if error.reason is Reason.PERMISSION_DENIED else RejectedCall()
        kind = error.reason.value, error.message, known
        if kind not in self._refused and len(self._refused) >= _MOST:
            kind = error.reason.value, "and calls of more kinds", RejectedCall()
        self._refused[kind] += times
        self._later()

    def write(self, caller: Caller, outcome: str) -> None:
        """The server's process writes down by itself that a call has ended."""

    def fault(self) -> None:
        """A call failed by a fault of this program."""
        self._fault = True
        self._later()

    def answer(self, document: dict[str, Any]) -> None:
        """Answer what the server asked, after all that happened before."""
        self._tell()
        if self._writer is not None:
            self._writer.write(child_channel.encode(document))

    def _later(self) -> None:
        if self._writer is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_SUM_S, self._at_last)

    def _at_last(self) -> None:
        self._timer = None
        self._tell()
        if self._refused or self._fault:
            self._later()

    def _tell(self) -> None:
        if self._writer is None or self._writer.transport.get_write_buffer_size():
            return
        if self._fault:
            self._fault = False
            self._writer.write(child_channel.encode({"op": "fault"}))
        refused, self._refused = self._refused, Counter()
        for (reason, message, attempt), times in refused.items():
            notice = {"op": "refused", "reason": reason, "message": message, "times": times}
            self._writer.write(child_channel.encode(notice | {"attempt": list(attempt)}))
