"""Answers of HTTP that are sent as they are made, to a client that may leave meanwhile."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

__all__ = ["ByteStream", "send_stream", "until_left"]

_T = TypeVar("_T")

_END = b"0\r\n\r\n"
#: Bytes of what a client sends after its request that are thrown away at once.
_USELESS = 4096


class ByteStream(Protocol):
    """The parts of an answer."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def aclose(self) -> None:
        """End what makes them."""


async def send_stream(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, parts: ByteStream, most_s: float
) -> None:
    """Send parts as HTTP's chunks; return when they have ended, and have been closed.

    Args:
        reader: Of the client.
        writer: To the client, which has the head.
        parts: What is sent.
        most_s: Longest time for a part to go, seconds.

    Raises:
        TimeoutError: The client takes nothing.
        EOFError: It has left.
        OSError: The connection broke.
    """
    try:
        await until_left(reader, _send(writer, parts, most_s))
    finally:
        await parts.aclose()


async def until_left(reader: asyncio.StreamReader, work: Awaitable[_T]) -> _T:
    """Return the result of what is done for a client; one that leaves has it cancelled.

    Args:
        reader: Of the client, which sends nothing more that counts.
        work: What is done.

    Raises:
        EOFError: The client has left, and the work has ended.
    """
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_end(reader))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise EOFError
        return await doing
    finally:
        doing.cancel()
        leaving.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _send(writer: asyncio.StreamWriter, parts: ByteStream, most_s: float) -> None:
    async for part in parts:
        # An empty chunk would be the end.
        if part:
            await _write(writer, b"%x\r\n%b\r\n" % (len(part), part), most_s)
    await _write(writer, _END, most_s)


async def _write(writer: asyncio.StreamWriter, data: bytes, most_s: float) -> None:
    writer.write(data)
    async with asyncio.timeout(most_s):
        await writer.drain()


async def _wait_end(reader: asyncio.StreamReader) -> None:
    while await reader.read(_USELESS):
        pass
