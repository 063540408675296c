"""One child as the server sees it: started, asked, watched by its signs of life, ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from weightsync import log_lines
from weightsync.errors import Reason, WeightSyncError
from weightsync.wire import child_channel
from weightsync.wire.documents import refusal_of
from weightsync_server.ops.tasks import in_thread

if TYPE_CHECKING:
    from concurrent.futures import Executor


logger = logging.getLogger(__name__)


#: Seconds that a child gets to end after SIGTERM, and the kernel after SIGKILL.
_TERM_S = 2.0
_KILL_S = 5.0

_Answer = tuple[dict[str, Any], bytes]


class ChildGoneError(Exception):
    """The process died or was killed because it answered too late; the task may be retried."""


class ChildUnsentError(ChildGoneError):
    """The process was gone before it was asked: it has seen nothing of the task."""


class Program(NamedTuple):
    """What runs in a child: `module`, with the number of its descriptor as argument.

    `failed` is the reason of the refusal where the program is needed and does not start. An empty
    `python` and an `environment` of None are those of the server. `remedy` helps where it cannot be
    started, `slow_remedy` ("": the same) where it is not ready in time.
    """

    name: str
    module: str
    failed: Reason = Reason.FETCHER_FAILED
    python: str = ""
    environment: Mapping[str, str] | None = None
    output: int = subprocess.DEVNULL
    remedy: str = "see the server's log, then retry"
    slow_remedy: str = ""


def _spawn(program: Program, fd: int, spawned: list[subprocess.Popen[bytes]]) -> None:
    command = [program.python or sys.executable, "-m", program.module, str(fd)]
    spawned.append(
        subprocess.Popen(
            command,
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            stdout=program.output,
            env=program.environment,
        )
    )


async def _spawned(
    program: Program, executor: Executor
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    try:
        ours, theirs = socket.socketpair()
    except OSError as error:
        raise _failed(program, f"could not be started: {error}") from error
    ours.setblocking(False)
    spawned: list[subprocess.Popen[bytes]] = []
    try:
        await in_thread(_spawn, program, theirs.fileno(), spawned, executor=executor)
    except (OSError, RuntimeError) as error:
        # RuntimeError: there is no thread to start it in.
        ours.close()
        raise _failed(program, f"could not be started: {error}") from error
    except BaseException:
        ours.close()
        for process in spawned:
            await in_thread(_reap, process, executor=executor)
        raise
    finally:
        theirs.close()
    return spawned[0], ours


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
        logger.exception("process %d is still running after SIGKILL", process.pid)


class ChildProcess:
    """A running child; its methods belong to the event loop's thread.

    `dead` is set once the process answers no more. `ready` is what it said when it was ready.
    `ended_for` is why this server has ended it, as the end of a sentence, or "".
    """

    def __init__(
        self,
        program: Program,
        process: subprocess.Popen[bytes],
        sock: socket.socket,
        on_notice: Callable[[dict[str, Any]], None],
    ) -> None:
        self.dead = asyncio.Event()
        self.ready: dict[str, Any] = {}
        self.ended_for = ""
        self._on_notice = on_notice
        self._name = program.name
        self._process = process
        self._sock = sock
        self._writer: asyncio.StreamWriter | None = None
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[_Answer]] = {}
        self._reading: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        return self._process.returncode

    @classmethod
    async def start(
        cls,
        program: Program,
        executor: Executor,
        ready_timeout_s: float,
        facts: Mapping[str, Any],
        on_notice: Callable[[dict[str, Any]], None],
    ) -> ChildProcess:
        """Return a child that is ready; a failed start leaves nothing behind.

        The threads of `executor` must outlive the process: the kernel kills it with the thread that
        started it (PR_SET_PDEATHSIG). `on_notice` is called with what the child says unasked; it
        raises ValueError when that is nonsense, and the child is killed.
        """
        process, sock = await _spawned(program, executor)
        self = cls(program, process, sock, on_notice)
        try:
            async with asyncio.timeout(ready_timeout_s):
                await self._greet(facts)
        except BaseException as error:
            await self.close(executor)
            if isinstance(error, EOFError):
                raise _failed(program, "ended before it was ready") from error
            if isinstance(error, TimeoutError):
                what = f"was not ready within {ready_timeout_s:g} s"
                raise _failed(program, what, program.slow_remedy) from error
            if isinstance(error, (OSError, ValueError, KeyError)):
                raise _failed(program, f"did not start correctly: {error!r}") from error
            raise
        return self

    async def call(
        self,
        document: dict[str, Any],
        fds: Sequence[int],
        timeout_s: float | None,
        cancelled: asyncio.Event | None = None,
    ) -> _Answer:
        """Ask and wait for the answer; a child that misses the deadline is killed.

        The caller closes its own `fds`. A `timeout_s` of None is no deadline. Once `cancelled` is
        set, the child is asked to stop; its answer is still waited for, so that afterwards it
        touches neither segment nor file. Raises ChildGoneError when there will be no answer,
        ChildUnsentError when the child was not even asked.
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
                        self._cancel(task)
                return await answer
        except TimeoutError as error:
            logger.warning(
                "%s %d missed a deadline of %.1f s: killed", self._name, self.pid, timeout_s
            )
            self.ended_for = f"did not answer for {timeout_s:g} s, and was ended"
            self.kill()
            raise ChildGoneError from error
        finally:
            del self._pending[task]
            if watch is not None:
                watch.cancel()

    def _cancel(self, task: int) -> None:
        try:
            self._send({"op": "cancel", "task": task})
        except ChildUnsentError as error:
            # This message; the task itself it has seen.
            raise ChildGoneError from error

    async def watch(self) -> None:
        await self.dead.wait()
        raise ChildGoneError

    def kill(self) -> None:
        """End it at once; who waits for it gets `ChildGoneError`."""
        self._process.kill()
        self._end()

    async def close(self, executor: Executor) -> None:
        self._end()
        try:
            await in_thread(_reap, self._process, executor=executor)
        finally:
            if self._reading is not None:
                self._reading.cancel()
            await child_channel.hang_up(self._writer, self._sock)

    async def _greet(self, facts: Mapping[str, Any]) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=self._sock, limit=1 << 20)
        hello, _ = await child_channel.read(reader)
        if hello["protocol"] != child_channel.PROTOCOL:
            raise ValueError(
                f"it speaks protocol {hello['protocol']}, not {child_channel.PROTOCOL}"
            )
        log = log_lines.configuration()
        self._send({"op": "start", "parent": os.getpid(), "log": log, **facts})
        self.ready, _ = await child_channel.read(reader)
        if "error" in self.ready:
            raise refusal_of(self.ready)
        self._reading = asyncio.create_task(self._read(reader), name=f"{self._name}-{self.pid}")

    def _send(self, document: dict[str, Any], fds: Sequence[int] = ()) -> None:
        # Past the transport, which cannot send descriptors and never writes by itself. At most
        # one small message per lane is under way, so a full socket means a stuck child.
        if self.dead.is_set() or self._sock.fileno() < 0:
            raise ChildUnsentError
        data = child_channel.encode(document)
        try:
            sent = socket.send_fds(self._sock, [data], list(fds))
        except (BlockingIOError, ConnectionError):
            sent = 0
        if sent != len(data):
            self.kill()
            raise ChildGoneError if sent else ChildUnsentError

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                document, blob = await child_channel.read(reader)
                if "id" not in document:
                    self._on_notice(document)
                    continue
                future = self._pending.get(document["id"])
                if future is not None and not future.done():
                    future.set_result((document, blob))
        except (OSError, EOFError):
            if not self.dead.is_set():
                logger.warning("%s %d has exited", self._name, self.pid)
        except (ValueError, KeyError):
            logger.exception("%s %d sent an invalid message: killed", self._name, self.pid)
            self._process.kill()
        finally:
            self._end()

    def _end(self) -> None:
        self.dead.set()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(ChildGoneError())
                future.exception()  # retrieved here: its waiter may have been cancelled


def _failed(program: Program, what: str, remedy: str = "") -> WeightSyncError:
    article = "an" if program.name[0] in "aeiou" else "a"
    return WeightSyncError(
        program.failed, f"{article} {program.name} process {what}; {remedy or program.remedy}"
    )


#: Segment ids in one message, which must fit into the socket's buffer at once.
_BATCH = 1000


class Heartbeat:
    """Asks a child for a sign of life every `heartbeat_s`; silent for `timeout_s`, it is killed."""

    def __init__(self, process: ChildProcess, heartbeat_s: float, timeout_s: float) -> None:
        self._process = process
        self._heartbeat_s = heartbeat_s
        self._timeout_s = timeout_s
        self._wanted = asyncio.Event()
        self._warm = False
        self._forgetting: dict[str, asyncio.Future[None]] = {}

    def forget(self, segment_id: str) -> asyncio.Future[None]:
        """Have the child unmap a segment; the result tells when it has, or has died."""
        if segment_id not in self._forgetting:
            self._forgetting[segment_id] = asyncio.get_running_loop().create_future()
        self._wanted.set()
        return self._forgetting[segment_id]

    def warm(self) -> None:
        self._warm = True
        self._wanted.set()

    async def run(self) -> None:
        """Tend the child until it is gone, then raise `ChildGoneError`."""
        while True:
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await self._wanted.wait()
            except TimeoutError:
                pass
            self._wanted.clear()
            batch = list(self._forgetting.items())[:_BATCH]
            request = {"op": "tend", "forget": [name for name, _ in batch], "warm": self._warm}
            self._warm = False
            await self._process.call(request, (), self._timeout_s)
            for name, done in batch:
                del self._forgetting[name]
                _settle(done)
            if self._forgetting:
                self._wanted.set()

    def end(self) -> None:
        """Settle what is open: the mappings have gone with the process."""
        for done in self._forgetting.values():
            _settle(done)
        self._forgetting.clear()


def _settle(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
