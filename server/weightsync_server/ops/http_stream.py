"""Answers of HTTP that are sent as they are made, to a client that may leave meanwhile."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["ByteStream", "send_stream"]

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
    sending = asyncio.ensure_future(_send(writer, parts, most_s))
    leaving = asyncio.ensure_future(_wait_end(reader))
    try:
        await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not sending.done():
            raise EOFError
        await sending
    finally:
        sending.cancel()
        leaving.cancel()
        await asyncio.gather(sending, leaving, return_exceptions=True)
        await parts.aclose()


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
