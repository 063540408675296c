"""Where streams of ingest processes arrive: no lack of anything makes it deaf or dumb."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
from typing import TYPE_CHECKING, Any

import pytest

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.ingest import ingest_pool
from weightsync_server.ingest import relay as relays
from weightsync_server.ingest.ingest_pool import StreamListener
from weightsync_server.ingest.relay import Relay
from weightsync_server.workers.runtime.mappings import Maps

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path


async def never(*_: Any) -> bytes:
    raise AssertionError


async def nothing() -> AsyncIterator[Any]:
    await asyncio.Event().wait()
    yield


@contextlib.contextmanager
def no_descriptor() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def turned_away(path: Path, sock: socket.socket) -> None:
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(5):
        await loop.sock_connect(sock, str(path))
        assert await loop.sock_recv(sock, 1) == b""


async def test_a_listener_outlives_the_loss_of_its_spare_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit: Any = None
    path = tmp_path / "s"
    listener = StreamListener(path, never, audit, list, print)
    # It has begun, and has its spare.
    with socket.socket(socket.AF_UNIX) as first:
        await turned_away(path, first)
    real, tries = os.open, []

    def taken(name: Any, *args: Any) -> int:
        tries.append(name)
        if len(tries) < 3:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(name, *args)

    with socket.socket(socket.AF_UNIX) as second, socket.socket(socket.AF_UNIX) as third:
        with no_descriptor(), monkeypatch.context() as patch:
            patch.setattr(os, "open", taken)
            await turned_away(path, second)
            await turned_away(path, third)
        assert tries
    with socket.socket(socket.AF_UNIX) as last:
        await turned_away(path, last)
    await listener.close()


async def test_a_stream_that_nobody_hears_of_is_sent_to_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relays, "_HEARD_S", 0.1)
    there, here = socket.socketpair()
    there.setblocking(False)
    with here, pytest.raises(WeightSyncError) as caught:
        async with asyncio.timeout(5):
            await Relay(there, Maps()).run({"op": "call"}, nothing())
    assert caught.value.reason is Reason.SERVER_AWAY
    assert caught.value.retry_after_s


class _Cut:
    """A connection whose caller leaves."""

    def __init__(self, *_: Any) -> None:
        self.left = asyncio.Event()

    async def open(self) -> dict[str, Any]:
        return {}

    async def cut(self) -> None:
        await self.left.wait()

    async def close(self) -> None:
        pass


async def test_what_fails_after_a_cut_is_in_the_log_though_the_server_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connection, cancelled, begun = _Cut(), asyncio.Event(), asyncio.Event()

    async def call(*_: Any) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            raise RuntimeError("the clean-up failed")

    monkeypatch.setattr(ingest_pool, "Connection", lambda *_: connection)
    audit: Any = None
    listener = StreamListener(tmp_path / "s", never, audit, list, print)
    monkeypatch.setattr(listener, "_call", call)
    with socket.socket() as sock:
        attending = asyncio.create_task(listener._attend(sock, 1))
        await begun.wait()
        connection.left.set()
        await cancelled.wait()
        attending.cancel()
        await asyncio.wait([attending])
    assert "fault in a call of an ingest process" in caplog.text
    assert "the clean-up failed" in caplog.text
    await listener.close()
