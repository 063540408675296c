"""Fetchers die, hang and are told to stop; nothing is lost and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import operator
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.support.processes import descriptors, names, open_files, state
from weightsync.errors import Reason, WeightSyncError
from weightsync.log_lines import JsonLines, about
from weightsync.wire import child_channel
from weightsync_server.workers.fetch import fetch_pool as pools
from weightsync_server.workers.fetch.fetch_pool import FetcherPool
from weightsync_server.workers.runtime import process_pool

if TYPE_CHECKING:
    from collections.abc import Callable

_SMALL = [("w", "U8", (1000,))]


def _exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _children() -> list[str]:
    return [str(child.pid) for child in psutil.Process().children()]


async def _stopped(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    await _until(lambda: state(pid) == "T")


async def _until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - a process changes it
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("count", [1, 2])
async def test_a_task_of_a_killed_fetcher_is_tried_again(
    count: int, fill: Callable[..., Any], pool_of: Callable[..., Any], tmp_path: Path
) -> None:
    restarts = []
    pool = await pool_of(count, on_restart=lambda: restarts.append(1))
    segment, shard, digests = fill(_SMALL)
    before = pool.pids
    for pid in before:
        await _stopped(pid)
    target = tmp_path / "0.safetensors"
    digesting = asyncio.create_task(pool.digest(segment, shard))
    writing = asyncio.create_task(pool.persist(segment, shard.size, str(target)))
    await asyncio.sleep(0.1)  # both are with a fetcher now
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert await digesting == digests
    await writing
    assert target.read_bytes() == bytes(segment.view[: shard.size])
    await _until(lambda: pool.alive == count)
    assert len(restarts) == count
    assert not set(before) & set(pool.pids)


async def test_what_is_logged_of_a_fetcher_is_not_about_the_call_that_started_it(
    pool_of: Callable[..., Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caplog.handler, "formatter", JsonLines("m"))
    with about(version=5):
        pool = await pool_of(1)
    os.kill(pool.pids[0], signal.SIGKILL)
    await _until(lambda: "has exited" in caplog.text)
    assert '"version"' not in caplog.text


async def test_a_fetcher_that_is_gone_before_it_is_asked_costs_no_attempt(
    fill: Callable[..., Any], pool_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "_MAX_ATTEMPTS", 1)
    pool = await pool_of(1)
    segment, shard, digests = fill(_SMALL)
    (process,) = pool._members
    # As asyncio closes it when the other end is gone, a moment before anybody is told.
    with socket.socket() as process._sock:
        pass
    assert await pool.digest(segment, shard) == digests
    assert process not in pool._members


async def test_what_a_killed_fetcher_was_writing_is_removed(
    fill: Callable[..., Any], pool_of: Callable[..., Any], tmp_path: Path
) -> None:
    pool = await pool_of(1)
    segment, shard, _ = fill([("w", "U8", (64 << 20,))])
    target = tmp_path / "0.safetensors"
    writing = asyncio.create_task(pool.persist(segment, shard.size, str(target)))
    await _until(lambda: bool(names(tmp_path)))
    os.kill(pool.pids[0], signal.SIGKILL)
    await writing
    assert names(tmp_path) == [target.name]
    assert target.read_bytes() == bytes(segment.view[: shard.size])


async def test_a_stuck_fetcher_is_killed_after_the_deadline(
    fill: Callable[..., Any], pool_of: Callable[..., Any]
) -> None:
    pool = await pool_of(1, task_timeout_s=0.5)
    segment, shard, digests = fill(_SMALL)
    (pid,) = pool.pids
    await _stopped(pid)
    begun = time.monotonic()
    assert await pool.digest(segment, shard) == digests
    assert 0.4 < time.monotonic() - begun < 15
    assert not _exists(pid)


async def test_a_stuck_fetcher_is_found_without_a_task(pool_of: Callable[..., Any]) -> None:
    pool = await pool_of(1, heartbeat_s=0.1, ready_timeout_s=4)
    (pid,) = pool.pids
    await asyncio.sleep(0.5)
    assert pool.pids == [pid]
    await _stopped(pid)
    await _until(lambda: pool.alive == 1 and pool.pids != [pid])
    assert not _exists(pid)


async def test_one_that_dies_at_once_again_and_again_is_started_less_often(
    pool_of: Callable[..., Any],
) -> None:
    pool = await pool_of(1)
    waits = []
    for _ in range(5):
        (pid,) = pool.pids
        os.kill(pid, signal.SIGKILL)
        begun = time.monotonic()
        await _until(lambda: pool.pids not in ([], [pid]))  # noqa: B023 - awaited here
        waits.append(time.monotonic() - begun)
    # The first is replaced at once, the fifth after 0.2, 0.4, 0.8 and now 1.6 s.
    assert waits[4] > 1.6
    assert waits[0] < waits[4] - 1


async def test_a_task_that_costs_three_fetchers_is_given_up(
    fill: Callable[..., Any], pool_of: Callable[..., Any]
) -> None:
    restarts = []
    pool = await pool_of(
        1, task_timeout_s=0, min_bytes_per_s=1e12, on_restart=lambda: restarts.append(1)
    )
    segment, shard, _ = fill(_SMALL)
    with pytest.raises(WeightSyncError) as caught:
        await pool.digest(segment, shard)
    assert caught.value.reason == Reason.FETCHER_FAILED
    await _until(lambda: len(restarts) == 3)


async def test_a_cancelled_task_is_over_when_its_caller_learns_it(
    fill: Callable[..., Any], pool_of: Callable[..., Any], tmp_path: Path
) -> None:
    pool = await pool_of(1)
    segment, shard, digests = fill(_SMALL)
    (pid,) = pool.pids
    await _stopped(pid)
    running = asyncio.create_task(pool.persist(segment, shard.size, str(tmp_path / "0")))
    await asyncio.sleep(0.1)
    waiting = asyncio.create_task(pool.persist(segment, shard.size, str(tmp_path / "1")))
    await asyncio.sleep(0.1)
    running.cancel()
    waiting.cancel()
    await asyncio.wait({waiting}, timeout=5)
    assert waiting.cancelled()
    await asyncio.sleep(0.1)
    assert not running.done()  # the fetcher may still write
    os.kill(pid, signal.SIGCONT)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await pool.digest(segment, shard) == digests
    assert "1" not in names(tmp_path)
    assert pool.pids == [pid]


async def test_stop_ends_all_and_fails_what_is_open(
    fill: Callable[..., Any], pool_of: Callable[..., Any]
) -> None:
    pool = await pool_of(2)
    segment, shard, _ = fill(_SMALL)
    pids = pool.pids
    for pid in pids:
        await _stopped(pid)  # does not hear SIGTERM
    open_tasks = [asyncio.create_task(pool.digest(segment, shard)) for _ in range(4)]
    await asyncio.sleep(0.1)
    begun = time.monotonic()
    await pool.stop()
    assert time.monotonic() - begun < 12
    for outcome in await asyncio.gather(*open_tasks, return_exceptions=True):
        assert isinstance(outcome, WeightSyncError)
        assert outcome.reason == Reason.SHUTTING_DOWN
    assert not any(map(_exists, pids))
    assert pool.alive == 0
    with pytest.raises(WeightSyncError) as caught:
        await pool.digest(segment, shard)
    assert caught.value.reason == Reason.SHUTTING_DOWN
    await pool.stop()


async def test_stop_right_after_start_leaves_nothing() -> None:
    pool = FetcherPool(2)
    await pool.start()
    pids = pool.pids
    await pool.stop()
    assert len(pids) == 2
    assert not any(map(_exists, pids))
    assert pool.alive == 0


async def test_a_cancelled_stop_still_settles_every_task(
    fill: Callable[..., Any], pool_of: Callable[..., Any]
) -> None:
    pool = await pool_of(1)
    segment, shard, _ = fill(_SMALL)
    (pid,) = pool.pids
    await _stopped(pid)
    digesting = asyncio.create_task(pool.digest(segment, shard))
    await asyncio.sleep(0.1)
    stopping = asyncio.create_task(pool.stop())
    for _ in range(3):
        await asyncio.sleep(0.1)
        stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert not _exists(pid)
    with pytest.raises(WeightSyncError) as caught:
        await digesting
    assert caught.value.reason == Reason.SHUTTING_DOWN


@pytest.mark.parametrize(
    ("script", "within"), [("#!/bin/sh\nexit 3\n", 5), ("#!/bin/sh\nexec sleep 60\n", 5)]
)
async def test_a_pool_that_cannot_start_leaves_nothing(
    script: str, within: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "python"
    fake.write_text(script)
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    before, children = open_files(), _children()
    begun = time.monotonic()
    pool = FetcherPool(2, ready_timeout_s=0.5)
    with pytest.raises(WeightSyncError) as caught:
        await pool.start()
    assert caught.value.reason == Reason.FETCHER_FAILED
    assert time.monotonic() - begun < within
    assert not open_files() - before
    assert _children() == children


async def test_waiting_tasks_are_refused_when_no_fetcher_can_be_started(
    fill: Callable[..., Any], pool_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = await pool_of(1)
    segment, shard, digests = fill(_SMALL)
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/nonexistent/python")
        os.kill(pool.pids[0], signal.SIGKILL)
        await _until(lambda: pool.alive == 0)
        with pytest.raises(WeightSyncError) as caught:
            await pool.digest(segment, shard)
        assert caught.value.reason == Reason.FETCHER_FAILED
    assert await pool.digest(segment, shard) == digests


# It counts the descriptors of a process that other tests use too.
@pytest.mark.alone
@pytest.mark.timeout(240)  # a second per restart where every core is taken
async def test_a_hundred_restarts_leak_nothing(
    fill: Callable[..., Any], pool_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each is killed as soon as it lives, and shall be replaced at once all the same.
    monkeypatch.setattr(process_pool, "_SHORT_LIFE_S", 0.0)
    restarts = []
    # Other tests may have left some, such as the tracker of multiprocessing.
    others = set(_children())
    pool = await pool_of(4, on_restart=lambda: restarts.append(1))
    segment, shard, digests = fill(_SMALL)

    async def round_of_kills() -> None:
        wanted = len(restarts) + 4
        for pid in pool.pids:
            os.kill(pid, signal.SIGKILL)
        await _until(lambda: len(restarts) >= wanted and pool.alive == 4, 30)

    await round_of_kills()
    assert await pool.digest(segment, shard) == digests
    # Descriptors that earlier tests left to the collector must not vanish, or appear, in between.
    gc.collect()

    def counts() -> tuple[int, int, int]:
        return descriptors(), len(_children()), len(asyncio.all_tasks())

    before = counts()
    for _ in range(25):
        await round_of_kills()
    assert await pool.digest(segment, shard) == digests
    gc.collect()
    # What ends a process that was killed may not be through when its successor is there.
    await _until(lambda: all(map(operator.le, counts(), before)), 30)
    # And no zombie among them.
    assert set(_children()) - others == set(map(str, pool.pids))


def test_a_fetcher_ends_with_its_socket() -> None:
    ours, theirs = socket.socketpair()
    command = [
        sys.executable,
        "-m",
        "weightsync_server.workers.fetch.fetch_main",
        str(theirs.fileno()),
    ]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as child:
        theirs.close()
        try:
            hello = {"op": "hello", "protocol": child_channel.PROTOCOL, "pid": child.pid}
            assert child_channel.receive(ours)[0] == hello
            ours.sendall(child_channel.encode({"op": "start", "parent": os.getpid()}))
            assert child_channel.receive(ours)[0] == {"op": "ready"}
            ours.close()
            assert child.wait(10) == 0
        finally:
            child.kill()


_PARENT = """
import asyncio
from weightsync_server.workers.fetch.fetch_pool import FetcherPool

async def main():
    pool = FetcherPool(2)
    await pool.start()
    print(*pool.pids, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_no_fetcher_outlives_a_killed_server() -> None:
    command = [sys.executable, "-c", _PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:  # noqa: ASYNC220 - a start
        assert server.stdout is not None
        line = await asyncio.to_thread(server.stdout.readline)
        pids = [int(word) for word in line.split()]
        assert all(map(_exists, pids))
        await _stopped(pids[0])  # hears no end of the socket; the kernel ends it
        server.kill()
    try:
        # Who has died and waits for the reaper of orphans is dead enough.
        await _until(lambda: not any(state(pid) not in ("", "Z") for pid in pids), 5)
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
