from __future__ import annotations

import asyncio
import gc
import inspect
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import (
    AbortedError,
    AsyncClient,
    Client,
    DeadlineError,
    NotFoundError,
    Retry,
    Timeouts,
    UnavailableError,
)


def arrays(seed: int, count: int = 5, size: int = 1000) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return {f"t{i}": rng.standard_normal(size).astype(np.float32) for i in range(count)}


@pytest.fixture
async def aio(running: Any, retry: Retry) -> AsyncIterator[AsyncClient]:
    timeouts = Timeouts(call_s=10, begin_s=10, stream_s=30, commit_s=10, apply_s=10)
    async with AsyncClient(running.address, timeouts=timeouts, retry=retry) as client:
        yield client


def test_both_clients_have_the_same_methods() -> None:
    def public(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(member).parameters)
            for name, member in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_")
        }

    sync, aio = public(Client), public(AsyncClient)
    del aio["model"], sync["cancel_pushes"]
    assert sync == aio
    assert (
        inspect.signature(Client).parameters.keys()
        == inspect.signature(AsyncClient).parameters.keys()
    )


async def test_push_and_calls(aio: AsyncClient, servicer: Any, tmp_path: Path) -> None:
    pushed = await aio.push(arrays(0), shard_bytes=8000, metadata={"step": "1"})
    assert pushed.version == 1
    await aio.push(iter(arrays(1).items()))
    assert (await aio.apply(2)).version == 2
    assert (await aio.verify()).verified
    assert (await aio.rollback("why")).rejected_version == 2
    assert [v.version for v in await aio.versions()] == [2, 1]
    assert (await aio.get_version(1)).metadata == {"step": "1"}
    assert (await aio.pin(1)).pinned
    assert await aio.acquire_epoch() == 1
    assert (await aio.status()).fetchers == 2
    servicer.applies = [pb.ApplyRecord(number=number) for number in (1, 2, 3)]
    assert [one.number for one in await aio.applies(0)] == [3, 2, 1]
    assert len((await aio.pull(tmp_path / "out", 1)).files) == 3
    names = [t.name async for t in aio.tensors(1)]
    assert names == [f"t{i}" for i in range(5)]
    again = await aio.push(tmp_path / "out", version=1)
    assert again.already
    await aio.abort("push-9")
    await aio.delete(2)
    with pytest.raises(NotFoundError):
        await aio.get_version(2)
    assert servicer.calls.count("GetStatus") == 2


async def test_async_iterables_are_read_step_by_step(aio: AsyncClient, servicer: Any) -> None:
    tensors = arrays(2, 9)
    loop = asyncio.get_running_loop()

    async def source() -> AsyncIterator[tuple[str, Any]]:
        for pair in tensors.items():
            assert asyncio.get_running_loop() is loop
            await asyncio.sleep(0)
            yield pair

    result = await aio.push(source(), shard_bytes=9000)
    assert result.tensor_count == 9
    assert len(servicer.uploads["push-0"].shards) == 5


async def test_the_loop_runs_on_while_bytes_move(aio: AsyncClient) -> None:
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.005)
            now = time.monotonic()
            longest, last = max(longest, now - last), now

    ticker = asyncio.create_task(tick())
    started = time.monotonic()
    await aio.push({"w": np.zeros(40_000_000, np.float32)})
    took = time.monotonic() - started
    ticker.cancel()
    assert longest < max(0.25, took / 2)


async def test_push_async_handle(aio: AsyncClient, servicer: Any) -> None:
    gate = threading.Event()
    servicer.before = lambda method, _request: method != "CommitPush" or gate.wait(10)
    handle = await aio.push_async(arrays(0))
    await asyncio.wait_for(asyncio.shield(handle.source_free), 10)
    assert not handle.committed.done()
    gate.set()
    assert (await handle.committed).version == 1


async def test_cancelling_ends_the_push(
    aio: AsyncClient, servicer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    gate, begun = threading.Event(), threading.Event()

    def hold(_chunk: Any) -> None:
        begun.set()
        gate.wait(10)

    servicer.chunk = hold
    task = asyncio.create_task(aio.push({"w": np.zeros(20_000_000, np.float32)}))
    assert await asyncio.to_thread(begun.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    for _ in range(100):
        if servicer.uploads["push-0"].aborted:
            break
        await asyncio.sleep(0.05)
    assert servicer.uploads["push-0"].aborted
    del task
    await asyncio.sleep(0.1)
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"], "told nobody else"


@pytest.mark.parametrize("awaited", [True, False])
async def test_leaving_by_an_error_cancels_pushes(
    running: Any, servicer: Any, caplog: pytest.LogCaptureFixture, awaited: bool
) -> None:
    gate = threading.Event()
    servicer.chunk = lambda _chunk: gate.wait(3)
    handles = []

    async def leave() -> None:
        async with AsyncClient(running.address) as client:
            handles.append(await client.push_async({"w": np.zeros(20_000_000, np.float32)}))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await leave()
    if awaited:
        with pytest.raises(AbortedError):
            await handles[0].committed
    await asyncio.wait([handles[0].committed])
    handles.clear()
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def test_errors_are_ours(running: Any, servicer: Any) -> None:
    servicer.before = lambda method, _request: time.sleep(1) if method == "GetStatus" else None
    async with AsyncClient(running.address, timeouts=Timeouts(call_s=0.1)) as client:
        with pytest.raises(DeadlineError):
            await client.status()
    once = Retry(attempts=1)
    async with AsyncClient("127.0.0.1:1", model="m", retry=once) as client:
        with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
            await client.apply(1)


async def test_watch(aio: AsyncClient, servicer: Any, status_error: Any) -> None:
    await aio.push(arrays(0))
    watch = aio.watch()
    assert (await anext(watch)).initial
    await aio.push(arrays(1))
    assert (await anext(watch)).version.version == 2
    servicer.watchers[0].put(status_error(grpc.StatusCode.UNAVAILABLE, "going away"))
    assert (await anext(watch)).initial
    assert servicer.calls.count("WatchVersions") == 2
    await watch.aclose()
