"""A link that can be cut, slowed, sliced and damaged, between a client and a server."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass

__all__ = ["FaultProxy", "Faults"]

_HALT_S = 0.02


@dataclass
class Faults:
    """What the link does to bytes; the byte counts run over all connections.

    Attributes:
        cut_after: Cut every connection once so many bytes went to the server; None: never.
        linger_s: What was passed on may be read for so long before the cut, in seconds.
        lose_replies: Nothing comes back from the server.
        latency_s: Delay of every piece, in seconds.
        slice_bytes: Pieces are passed on in slices of so many bytes; 0: as they come.
        flip_at: The byte to the server in which a bit is flipped; None: none.
        refuse: New connections end at once.
        halt: Nothing passes, and what comes waits until it does again.
    """

    cut_after: int | None = None
    linger_s: float = 0.0
    lose_replies: bool = False
    latency_s: float = 0.0
    slice_bytes: int = 0
    flip_at: int | None = None
    refuse: bool = False
    halt: bool = False


class FaultProxy:
    """Passes TCP connections on to a server, on a thread and loop of its own.

    Args:
        target: `unix:PATH` or HOST:PORT of the server.

    Attributes:
        faults: What the link does; may be changed at any time.
        address: Where it listens.
        passed: Bytes that went to the server.
        cuts: Times that the link was cut.
        lost: What the server said while its replies were lost.
    """

    def __init__(self, target: str) -> None:
        self.faults = Faults()
        self.address = ""
        self.passed = 0
        self.cuts = 0
        self.lost = bytearray()
        self._target = target
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)
        self._thread.start()
        self._ready.wait(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", 0)
        )
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._ready.set()
        self._loop.run_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.faults.refuse:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await self._connect()
        except OSError:
            writer.close()
            return
        self._open |= {writer, far_writer}
        # A task that ends as cancelled is an error to asyncio's streams.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(self._up(reader, far_writer), self._down(far_reader, writer))
        for end in (writer, far_writer):
            self._open.discard(end)
            end.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._target.startswith("unix:"):
            return await asyncio.open_unix_connection(self._target.removeprefix("unix:"))
        return await asyncio.open_connection(*self._target.rsplit(":", 1))

    async def _up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                faults = self.faults
                if faults.cut_after is not None:
                    data = data[: max(0, faults.cut_after - self.passed)]
                if faults.flip_at is not None and 0 <= faults.flip_at - self.passed < len(data):
                    damaged = bytearray(data)
                    damaged[faults.flip_at - self.passed] ^= 1
                    data, faults.flip_at = bytes(damaged), None
                await self._pass(data, writer)
                self.passed += len(data)
                if faults.cut_after is not None and self.passed >= faults.cut_after:
                    faults.cut_after = None
                    await asyncio.sleep(faults.linger_s)
                    self.cuts += 1
                    self._cut()
        if not writer.is_closing():
            writer.close()

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if self.faults.lose_replies:
                    self.lost += data
                else:
                    await self._pass(data, writer)
        if not writer.is_closing():
            writer.close()

    async def _pass(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        if self.faults.latency_s:
            await asyncio.sleep(self.faults.latency_s)
        while self.faults.halt:  # noqa: ASYNC110 - it is changed by another thread
            await asyncio.sleep(_HALT_S)
        step = self.faults.slice_bytes or len(data) or 1
        for at in range(0, len(data), step):
            writer.write(data[at : at + step])
            await writer.drain()

    def _cut(self) -> None:
        for writer in list(self._open):
            writer.transport.abort()

    def cut(self) -> None:
        """Cut every connection now."""
        self._loop.call_soon_threadsafe(self._cut)

    def close(self) -> None:
        """Close it with every connection."""

        async def end() -> None:
            self._server.close()
            self._cut()
            ours = asyncio.current_task()
            others = [task for task in asyncio.all_tasks() if task is not ours]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()
