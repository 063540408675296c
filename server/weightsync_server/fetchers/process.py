"""One fetcher process as the server sees it: started, asked, watched, ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.fetchers import wire
from weightsync_server.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Executor

__all__ = ["FetcherProcess", "Gone"]

logger = logging.getLogger(__name__)

#: Seconds that a fetcher gets to end after SIGTERM, and the kernel after SIGKILL.
_TERM_S = 2.0
_KILL_S = 5.0

_Answer = tuple[dict[str, Any], bytes]


class Gone(Exception):  # noqa: N818 - the caller retries
    """The process died or was killed because it answered too late; the task may be retried."""


def _spawn(fd: int, spawned: list[subprocess.Popen[bytes]]) -> None:
    command = [sys.executable, "-m", "weightsync_server.fetchers.child", str(fd)]
    spawned.append(
        subprocess.Popen(
            command, pass_fds=[fd], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
    )


def _reap(process: subprocess.Popen[bytes]) -> None:
    """End the process: TERM, then KILL. Blocks for seconds, so it runs in a thread."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_TERM_S)
        return
    process.kill()
    try:
        process.wait(_KILL_S)
    except subprocess.TimeoutExpired:
        # It hangs in the kernel (a dead network disk); subprocess reaps it when it can.
        logger.exception("fetcher %d does not die of SIGKILL", process.pid)


class FetcherProcess:
    """A running fetcher. Every method belongs to the event loop's thread.

    Attributes:
        dead: Set once the process answers no more.
    """

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self.dead = asyncio.Event()
        self._process = process
        self._sock = sock
        self._writer: asyncio.StreamWriter | None = None
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[_Answer]] = {}
        self._reading: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @classmethod
    async def start(cls, executor: Executor, ready_timeout_s: float) -> FetcherProcess:
        """Return a fetcher that is ready; a failed start leaves nothing behind.

        Args:
            executor: Threads that outlive the process: the kernel kills it with the thread that
                started it (PR_SET_PDEATHSIG).
            ready_timeout_s: Deadline of the handshake in seconds.

        Raises:
            WeightSyncError: FETCHER_FAILED.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        spawned: list[subprocess.Popen[bytes]] = []
        try:
            await in_thread(_spawn, theirs.fileno(), spawned, executor=executor)
        except OSError as error:
            ours.close()
            raise _failed(f"could not be started: {error}") from error
        except BaseException:
            ours.close()
            for process in spawned:
                await in_thread(_reap, process, executor=executor)
            raise
        finally:
            theirs.close()
        self = cls(spawned[0], ours)
        try:
            async with asyncio.timeout(ready_timeout_s):
                await self._greet()
        except BaseException as error:
            await self.close(executor)
            if isinstance(error, (OSError, EOFError, ValueError, KeyError)):
                raise _failed(f"was not ready within {ready_timeout_s:g} s: {error!r}") from error
            raise
        return self

    async def call(
        self,
        document: dict[str, Any],
        fds: Sequence[int],
        timeout_s: float,
        cancelled: asyncio.Event | None = None,
    ) -> _Answer:
        """Ask and wait for the answer; a fetcher that misses the deadline is killed.

        Args:
            document: The task; an `id` is added.
            fds: Descriptors to send along; the caller closes its own.
            timeout_s: Deadline in seconds.
            cancelled: Once set, the fetcher is asked to stop; its answer is still waited for, so
                that afterwards it touches neither segment nor file.

        Raises:
            Gone: There will be no answer.
        """
        task = next(self._ids)
        answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._pending[task] = answer
        watch = asyncio.create_task(cancelled.wait()) if cancelled is not None else None
        try:
            self._send({**document, "id": task, "fds": len(fds)}, fds)
            async with asyncio.timeout(timeout_s):
                if watch is not None:
                    either: list[asyncio.Future[Any]] = [answer, watch]
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                    if not answer.done():
                        self._send({"op": "cancel", "task": task})
                return await answer
        except TimeoutError as error:
            logger.warning("fetcher %d missed a deadline of %.1f s: killed", self.pid, timeout_s)
            self.kill()
            raise Gone from error
        finally:
            del self._pending[task]
            if watch is not None:
                watch.cancel()

    async def watch(self) -> None:
        """Wait until the process answers no more.

        Raises:
            Gone: It does not.
        """
        await self.dead.wait()
        raise Gone

    def kill(self) -> None:
        """End it at once; who waits for it gets `Gone`."""
        self._process.kill()
        self._end()

    async def close(self, executor: Executor) -> None:
        """End it, TERM then KILL, and wait until the kernel has forgotten it."""
        self._end()
        try:
            await in_thread(_reap, self._process, executor=executor)
        finally:
            if self._reading is not None:
                self._reading.cancel()
            if self._writer is not None:
                self._writer.close()
                with contextlib.suppress(OSError):
                    await self._writer.wait_closed()
            self._sock.close()

    async def _greet(self) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=self._sock, limit=1 << 20)
        hello, _ = await wire.read(reader)
        if hello["protocol"] != wire.PROTOCOL:
            msg = f"it speaks protocol {hello['protocol']}, not {wire.PROTOCOL}"
            raise ValueError(msg)
        self._send({"op": "start", "parent": os.getpid()})
        await wire.read(reader)
        self._reading = asyncio.create_task(self._read(reader), name=f"fetcher-{self.pid}")

    def _send(self, document: dict[str, Any], fds: Sequence[int] = ()) -> None:
        # Past the transport, which cannot send descriptors and never writes by itself. At most
        # one small message per lane is under way, so a full socket means a stuck fetcher.
        if self.dead.is_set():
            raise Gone
        data = wire.encode(document)
        try:
            sent = socket.send_fds(self._sock, [data], list(fds))
        except (BlockingIOError, ConnectionError):
            sent = 0
        if sent != len(data):
            self.kill()
            raise Gone

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                document, blob = await wire.read(reader)
                future = self._pending.get(document["id"])
                if future is not None and not future.done():
                    future.set_result((document, blob))
        except (OSError, EOFError):
            if not self.dead.is_set():
                logger.warning("fetcher %d is gone", self.pid)
        except (ValueError, KeyError):
            logger.exception("fetcher %d sent what cannot be understood: killed", self.pid)
            self._process.kill()
        finally:
            self._end()

    def _end(self) -> None:
        self.dead.set()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(Gone())
                future.exception()  # retrieved here: its waiter may have been cancelled


def _failed(what: str) -> WeightSyncError:
    return WeightSyncError(
        Reason.FETCHER_FAILED, f"a fetcher process {what}; see the server's log, then retry"
    )
