"""A process that sends nonsense is killed, and counts as gone only when it is."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from typing import TYPE_CHECKING, Any

import pytest

from weightsync.wire import child_channel
from weightsync_server.ingest.connection import Connection
from weightsync_server.ingest.ingest_pool import StreamListener

if TYPE_CHECKING:
    from pathlib import Path

#: No JSON, no operation, a size over all bounds, deeper than a parser goes.
NONSENSE = [
    b"\x01\x00\x00\x00\x00\x00\x00\x00x",
    child_channel.encode({}),
    b"\xff" * 8,
    (50_000).to_bytes(4, "little") + bytes(4) + b"[" * 50_000,
]


@pytest.mark.parametrize("nonsense", NONSENSE, ids=["text", "no op", "size", "deep"])
async def test_nobody_is_gone_before_the_kernel_says_so(nonsense: bytes) -> None:
    there, here = socket.socketpair()
    here.setblocking(False)
    killed = asyncio.Event()
    connection = Connection(here, killed.set)
    there.sendall(child_channel.encode({"op": "call"}))
    await connection.open()
    there.sendall(nonsense)
    async with asyncio.timeout(5):
        await killed.wait()
        ceasing = asyncio.create_task(connection.cease())
        await asyncio.sleep(0.1)
        # It is killed, but may write still.
        assert not ceasing.done()
        there.sendall(b"more" * 1000)
        there.close()
        await ceasing
        await connection.close()


@pytest.mark.parametrize("whole", [False, True])
async def test_a_stream_is_cut_unless_it_came_to_its_end(*, whole: bool) -> None:
    there, here = socket.socketpair()
    here.setblocking(False)
    connection = Connection(here, lambda: None)
    there.sendall(child_channel.encode({"op": "call"}))
    await connection.open()
    if whole:
        there.sendall(child_channel.encode({"op": "end"}))
    there.close()
    cut = asyncio.create_task(connection.cut())
    done, _ = await asyncio.wait([cut], timeout=0.3 if whole else 5)
    assert bool(done) is not whole
    cut.cancel()
    await connection.close()


async def test_a_fault_in_a_call_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    audit: Any = None

    async def serve(*_: Any) -> bytes:
        raise AssertionError

    path = tmp_path / "s"
    listener = StreamListener(path, serve, audit, lambda: [os.getpid()], print)
    with socket.socket(socket.AF_UNIX) as process, caplog.at_level(logging.ERROR):
        process.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(process, str(path))
        # Its peer and more is missing.
        await loop.sock_sendall(process, child_channel.encode({"op": "call", "everybody": True}))
        async with asyncio.timeout(5):
            while "fault in a call of" not in caplog.text:  # noqa: ASYNC110 - a log tells nobody
                await asyncio.sleep(0.01)
    await listener.close()
    assert "KeyError: 'peer'" in caplog.text
