"""The process that copies from GPUs, on a host that has none; tests/gpu has the same with one."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.processes import descriptors, state
from weightsync.errors import Reason, WeightSyncError
from weightsync.gpu import ipc
from weightsync.gpu.ipc import Device, DeviceError, device_of, place_of
from weightsync.shm.incoming_version import HANDLE_BYTES
from weightsync.shm.segments import Segment
from weightsync_server.workers.fetch import gpu_copy
from weightsync_server.workers.fetch.fetch_api import GpuSource, Piece, StridedPiece
from weightsync_server.workers.fetch.gpu_copy import GpuFetchPool
from weightsync_server.workers.fetch.shard_tasks import BrokenError, Cancelled
from weightsync_server.workers.runtime.mappings import Maps

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

DEVICE = "ab" * 16


@pytest.fixture
def segment() -> Iterator[Segment]:
    segment = Segment.create(1 << 20)
    yield segment
    segment.close()


# The process.


@pytest.fixture
async def collector() -> AsyncIterator[GpuFetchPool]:
    collector = GpuFetchPool()
    yield collector
    await collector.close()


async def outcome(collector: GpuFetchPool, segment: Segment, count: int = 1) -> WeightSyncError:
    handles = [f"{number:0{2 * HANDLE_BYTES}x}" for number in range(count)]
    pieces = [(number, (1 << 62) + number, 16 * number, 16) for number in range(count)]
    with pytest.raises(WeightSyncError) as told:
        await collector.collect(segment, GpuSource("trainer", DEVICE, handles, pieces))
    return told.value


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - a process changes it
            await asyncio.sleep(0.01)


def mapped(pid: int) -> bool:
    return "memfd:weightsync" in Path(f"/proc/{pid}/maps").read_text()


async def test_it_starts_when_it_is_needed_and_tells_why_it_cannot_copy(
    collector: GpuFetchPool, segment: Segment
) -> None:
    assert collector.alive == 0
    errors = await asyncio.gather(*(outcome(collector, segment) for _ in range(3)))
    assert {error.reason for error in errors} == {Reason.NOT_SUPPORTED}
    assert "cannot be opened here: there is no CUDA driver" in errors[0].message
    # One for all, which lives on, and keeps the mapping until it is told to forget it.
    (pid,) = collector.pids
    assert mapped(pid)
    await collector.forget(segment.id)
    assert not mapped(pid)


async def test_many_shards_of_many_tensors_at_once_are_understood(
    collector: GpuFetchPool, segment: Segment
) -> None:
    await outcome(collector, segment)
    # What tests before this one left is closed when it is collected.
    gc.collect()
    pids, before = collector.pids, descriptors()
    errors = await asyncio.gather(*(outcome(collector, segment, 2048) for _ in range(8)))
    assert {error.reason for error in errors} == {Reason.NOT_SUPPORTED}
    assert (collector.pids, descriptors()) == (pids, before)


async def asked_of_a_stopped_one(
    collector: GpuFetchPool, segment: Segment
) -> tuple[int, asyncio.Task[WeightSyncError]]:
    await outcome(collector, segment)
    (pid,) = collector.pids
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: state(pid) == "T")
    asked = asyncio.create_task(outcome(collector, segment))
    await asyncio.sleep(0.1)
    return pid, asked


async def test_a_copy_is_not_tried_again_when_the_process_is_lost(
    collector: GpuFetchPool, segment: Segment
) -> None:
    pid, asked = await asked_of_a_stopped_one(collector, segment)
    os.kill(pid, signal.SIGKILL)
    assert (await asked).reason is Reason.FETCHER_FAILED
    # The next one is for the process that takes its place.
    assert (await outcome(collector, segment)).reason is Reason.NOT_SUPPORTED
    assert pid not in collector.pids


async def test_one_that_is_stuck_is_killed_and_replaced(
    collector: GpuFetchPool, segment: Segment
) -> None:
    await outcome(collector, segment)
    (pid,) = collector.pids
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: state(pid) == "T")
    collector._task_timeout_s = 0.5
    assert (await outcome(collector, segment)).reason is Reason.FETCHER_FAILED
    collector._task_timeout_s = 60
    assert (await outcome(collector, segment)).reason is Reason.NOT_SUPPORTED
    assert pid not in collector.pids


async def test_a_start_that_fails_leaves_it_to_the_trainer_and_is_tried_again(
    collector: GpuFetchPool, segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = descriptors()
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/nonexistent/python")
        error = await outcome(collector, segment)
        assert error.reason is Reason.NOT_SUPPORTED
        assert "could not be started" in error.message
        assert descriptors() == before
    assert "no CUDA driver" in (await outcome(collector, segment)).message


async def test_one_that_was_closed_is_not_started_again(
    collector: GpuFetchPool, segment: Segment
) -> None:
    starting = asyncio.create_task(outcome(collector, segment))
    await until(collector._starting.locked)
    await collector.close()
    assert collector.alive == 0
    assert (await starting).reason is Reason.SHUTTING_DOWN
    assert (await outcome(collector, segment)).reason is Reason.SHUTTING_DOWN
    assert collector.alive == 0


async def test_who_waits_when_it_is_closed_is_told_so(
    collector: GpuFetchPool, segment: Segment
) -> None:
    _, asked = await asked_of_a_stopped_one(collector, segment)
    await collector.close()
    assert (await asked).reason is Reason.SHUTTING_DOWN


_BREAKING = """
import sys
from weightsync.errors import Reason
from weightsync_server.workers.fetch import fetch_main, gpu_copy
from weightsync_server.workers.fetch.shard_tasks import BrokenError

def broken(*_):
    raise BrokenError(Reason.FETCHER_FAILED, "copying from the trainer's GPU failed; push again")

gpu_copy.collect = broken
fetch_main.main()
"""


async def test_one_whose_device_has_failed_tells_so_and_is_replaced(
    collector: GpuFetchPool, segment: Segment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program, python = tmp_path / "breaking.py", tmp_path / "python"
    program.write_text(_BREAKING)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$3"\n')
    python.chmod(0o755)
    with monkeypatch.context() as breaking:
        breaking.setattr(sys, "executable", str(python))
        await collector.start()
    (pid,) = collector.pids
    error = await outcome(collector, segment)
    assert error.reason is Reason.FETCHER_FAILED
    assert "copying from the trainer's GPU failed" in error.message
    await until(lambda: collector.pids not in ([], [pid]))
    assert state(pid) == ""
    assert (await outcome(collector, segment)).reason is Reason.NOT_SUPPORTED


# What it does, with a stand-in for the driver.


class Driver:
    """Allocations by handle, in this process; a registered mapping is noted by its address."""

    def __init__(self) -> None:
        self.memory: dict[bytes, Any] = {}
        self.registered: list[int] = []
        self.streams = 0
        self._open: Counter[int] = Counter()
        self._lock = threading.Lock()
        self.fails = ""
        self.device: Device

    @property
    def opened(self) -> int:
        return self._open.total()

    def allocate(self, data: bytes) -> bytes:
        handle = bytes([len(self.memory)]) * HANDLE_BYTES
        self.memory[handle] = ctypes.create_string_buffer(data, len(data))
        return handle

    def call(self, name: str, *arguments: Any) -> None:
        if name == self.fails:
            raise DeviceError(f"{name} answered 1")
        getattr(self, name, lambda *_: None)(*arguments)

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, _: int) -> None:  # noqa: N802
        raw = bytes(handle.bytes)
        if raw not in self.memory:
            raise DeviceError("cuIpcOpenMemHandle_v2 answered 1")
        address._obj.value = ctypes.addressof(self.memory[raw])
        with self._lock:
            self._open[address._obj.value] += 1

    def cuIpcCloseMemHandle(self, address: Any) -> None:  # noqa: N802
        with self._lock:
            self._open[address.value] -= 1

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: Any) -> None:  # noqa: N802
        base._obj.value, size._obj.value = address.value, self._size(address.value)

    def cuMemHostRegister_v2(self, address: int, *_: int) -> int:  # noqa: N802
        self.registered.append(address)
        return 0

    def cuMemHostUnregister(self, address: int) -> None:  # noqa: N802
        self.registered.remove(address)

    def cuStreamCreate(self, *_: Any) -> None:  # noqa: N802
        self.streams += 1

    def cuStreamDestroy_v2(self, *_: Any) -> None:  # noqa: N802
        self.streams -= 1

    def cuMemcpyDtoHAsync_v2(self, to: int, source: int, size: int, _: Any) -> None:  # noqa: N802
        self._check_open(source, size)
        ctypes.memmove(to, source, size)

    def cuMemcpy2DAsync_v2(self, told: Any, _: Any) -> None:  # noqa: N802
        copy = told._obj
        assert (copy.src_type, copy.dst_type) == (2, 1)
        assert copy.width <= copy.dst_pitch
        self._check_open(copy.src_device, copy.src_pitch * (copy.height - 1) + copy.width)
        for row in range(copy.height):
            to, source = (
                copy.dst_host + row * copy.dst_pitch,
                copy.src_device + row * copy.src_pitch,
            )
            ctypes.memmove(to, source, copy.width)

    def _check_open(self, source: int, size: int) -> None:
        with self._lock:
            if not any(
                count and at <= source and source + size <= at + self._size(at)
                for at, count in self._open.items()
            ):
                raise DeviceError("a copy answered 700")

    def _size(self, address: int) -> int:
        (found,) = (m for m in self.memory.values() if ctypes.addressof(m) == address)
        return len(found)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(ipc, "_call", driver.call)
    monkeypatch.setattr(ipc, "_driver", lambda: driver)
    device = Device(0)
    monkeypatch.setattr(gpu_copy, "device_of", lambda _: device)
    driver.device = device
    return driver


def collect(
    segment: Segment,
    handles: list[bytes],
    pieces: list[Piece],
    *,
    opened: gpu_copy.Opened | None = None,
    trainer: str = "trainer",
    stop: threading.Event | None = None,
    strided: Sequence[StridedPiece] = (),
) -> None:
    source = GpuSource(trainer, b"u".hex(), [one.hex() for one in handles], pieces, strided)
    opened = opened or gpu_copy.Opened()
    registered = gpu_copy.Registered()
    gpu_copy.collect(segment.view, source, registered, opened, stop or threading.Event())


def test_pieces_go_where_they_belong(
    driver: Driver, segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_copy, "_STEP", 7)
    first, second = driver.allocate(b"0123456789" * 3), driver.allocate(b"abc")
    collect(segment, [first, second], [(0, 5, 100, 20), (1, 0, 120, 3), (0, 29, 200, 1)])
    assert bytes(segment.view[99:124]) == b"\0" + (b"0123456789" * 3)[5:25] + b"abc\0"
    assert bytes(segment.view[200:202]) == b"9\0"
    assert (driver.opened, driver.streams, len(driver.registered)) == (0, 0, 1)


@pytest.mark.parametrize("step", [2, 7, 64])
def test_rows_go_apart_where_they_belong(
    driver: Driver, segment: Segment, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setattr(gpu_copy, "_STEP", step)
    # Six rows fill the allocation, and reach over twice as much of the segment.
    handle = driver.allocate(b"..aaabbbcccdddeeefff")
    collect(segment, [handle], [(0, 0, 0, 2)], strided=[StridedPiece(0, 2, 90, 3, 6, 10)])
    rows = [bytes(segment.view[at : at + 10]) for at in range(90, 150, 10)]
    assert rows == [letter * 3 + bytes(7) for letter in (b"a", b"b", b"c", b"d", b"e", b"f")]
    assert bytes(segment.view[:2]) == b".."
    # The last row may end where the segment does.
    last = StridedPiece(0, 0, segment.capacity - 12, 2, 2, 10)
    collect(segment, [handle], [], strided=[last])
    assert bytes(segment.view[-2:]) == b"aa"


@pytest.mark.parametrize(
    "piece",
    [
        StridedPiece(0, 0, 0, 3, 4, 10),
        StridedPiece(0, 9, 0, 1, 2, 10),
        StridedPiece(0, 0, (1 << 20) - 11, 2, 2, 10),
    ],
)
def test_no_row_is_copied_from_or_to_beyond(
    driver: Driver, segment: Segment, piece: StridedPiece
) -> None:
    with pytest.raises(WeightSyncError) as told:
        collect(segment, [driver.allocate(b"x" * 10)], [], strided=[piece])
    assert told.value.reason is Reason.REQUEST_INVALID
    assert bytes(segment.view) == bytes(segment.capacity)


@pytest.mark.parametrize(
    "piece", [(1, 0, 0, 11), (1, 10, 0, 1), (1, 1 << 62, 0, 1), (0, 0, (1 << 20) - 4, 5)]
)
def test_nothing_is_copied_from_or_to_beyond(
    driver: Driver, segment: Segment, piece: Piece
) -> None:
    handles = [driver.allocate(b"x" * 100), driver.allocate(b"x" * 10)]
    with pytest.raises(WeightSyncError) as told:
        collect(segment, handles, [(0, 0, 0, 100), piece])
    assert told.value.reason is Reason.REQUEST_INVALID
    assert bytes(segment.view) == bytes(segment.capacity)
    assert (driver.opened, driver.streams) == (0, 0)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("cuCtxSetCurrent", Reason.NOT_SUPPORTED),
        ("cuIpcOpenMemHandle_v2", Reason.NOT_SUPPORTED),
        ("cuMemGetAddressRange_v2", Reason.NOT_SUPPORTED),
        ("cuStreamCreate", Reason.FETCHER_FAILED),
        ("cuMemcpyDtoHAsync_v2", Reason.FETCHER_FAILED),
        ("cuStreamSynchronize", Reason.FETCHER_FAILED),
    ],
)
def test_a_driver_that_refuses_is_not_used_and_one_that_fails_is_left(
    driver: Driver, segment: Segment, call: str, reason: Reason
) -> None:
    handle = driver.allocate(b"x" * 10)
    driver.fails = call
    with pytest.raises(WeightSyncError, match=f"{call} answered 1") as told:
        collect(segment, [handle], [(0, 0, 0, 10)])
    assert told.value.reason is reason
    assert isinstance(told.value, BrokenError) is (reason is Reason.FETCHER_FAILED)
    assert driver.opened == 0


def test_a_copy_that_is_called_off_ends_between_two_steps(driver: Driver, segment: Segment) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(Cancelled):
        collect(segment, [driver.allocate(b"x" * 10)], [(0, 0, 0, 10)], stop=stop)
    assert (driver.opened, driver.streams) == (0, 0)


def test_an_allocation_is_open_once_until_nothing_is_copied_for_its_trainer(
    driver: Driver, segment: Segment
) -> None:
    opened, handles = gpu_copy.Opened(), [driver.allocate(b"x" * 10) for _ in range(3)]
    seen: list[tuple[str, int]] = []

    def copied(number: int, trainer: str) -> None:
        collect(segment, [handles[number]], [(0, 0, 0, 10)], opened=opened, trainer=trainer)
        seen.append((trainer, driver.opened))

    with opened.of("first", threading.Event()):
        for number in (0, 1, 1, 0):
            copied(number, "first")
        copied(2, "second")
        with pytest.raises(WeightSyncError, match="cannot be opened"):
            collect(segment, [b"?" * HANDLE_BYTES], [(0, 0, 0, 10)], opened=opened, trainer="first")
        copied(2, "first")
    assert seen == [*(("first", open_) for open_ in (1, 2, 2, 2)), ("second", 2), ("first", 3)]
    assert driver.opened == 0
    copied(0, "first")
    assert seen[-1] == ("first", 0)


def test_copies_of_one_trainer_in_many_threads_leave_nothing_open(
    driver: Driver, segment: Segment
) -> None:
    opened, handles = gpu_copy.Opened(), [driver.allocate(b"x" * 10) for _ in range(4)]
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(50):
                collect(segment, handles, [(3, 0, 0, 10)], opened=opened)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (failed, driver.opened, driver.streams) == ([], 0, 0)


def test_trainers_have_turns_one_after_the_other(driver: Driver, segment: Segment) -> None:
    opened, handle = gpu_copy.Opened(at_once=1), driver.allocate(b"x" * 10)
    seen: list[str] = []
    threads = []
    with opened.of("first", threading.Event()):
        for number, trainer in enumerate(("first", "first", "second", "second", "first"), 1):

            def copied(number: int = number, trainer: str = trainer) -> None:
                collect(segment, [handle], [(0, 0, 0, 10)], opened=opened, trainer=trainer)
                seen.append(f"{trainer} {number}")

            threads.append(threading.Thread(target=copied))
            threads[-1].start()
            while len(opened._waiting) < number:
                time.sleep(0.001)
        assert (seen, driver.opened) == ([], 0)
    for thread in threads:
        thread.join()
    assert seen == ["first 1", "second 3", "first 2", "second 4", "first 5"]
    assert driver.opened == 0


def test_nobody_overtakes_by_a_new_name(driver: Driver, segment: Segment) -> None:
    opened, handle = gpu_copy.Opened(at_once=1), driver.allocate(b"x" * 10)
    seen: list[str] = []
    threads: list[threading.Thread] = []

    def copy(trainer: str) -> None:
        def copied() -> None:
            with opened.of(trainer, threading.Event()):
                seen.append(trainer)
                if trainer.startswith("new") and len(threads) < 20:
                    copy(f"new {len(threads)}")

        waiting = len(opened._waiting)
        threads.append(threading.Thread(target=copied))
        threads[-1].start()
        while len(opened._waiting) == waiting:
            time.sleep(0.001)

    with opened.of("busy", threading.Event()):
        for _ in range(4):
            copy("patient")
        copy("new")
    for thread in threads:
        thread.join()
    assert "patient" not in seen[8:]
    assert len(seen) == 20
    collect(segment, [handle], [(0, 0, 0, 10)], opened=opened)


def test_a_copy_that_nobody_wants_does_not_wait_for_its_turn(
    driver: Driver, segment: Segment
) -> None:
    opened, handle, stop = gpu_copy.Opened(at_once=1), driver.allocate(b"x" * 10), threading.Event()
    with opened.of("busy", threading.Event()):
        threading.Timer(0.05, stop.set).start()
        with pytest.raises(Cancelled):
            collect(segment, [handle], [(0, 0, 0, 10)], opened=opened, trainer="other", stop=stop)
        assert (opened._waiting, list(opened._loans)) == ([], ["busy"])
    collect(segment, [handle], [(0, 0, 0, 10)], opened=opened)
    assert driver.opened == 0


async def test_a_copy_has_time_for_those_before_it(segment: Segment) -> None:
    pool = GpuFetchPool()
    alone = pool._time_for(segment.capacity)
    pool._load = 100 * segment.capacity
    assert pool._time_for(segment.capacity) > alone


def test_a_mapping_is_registered_once_and_let_go_of_before_it_is_unmapped(
    driver: Driver, segment: Segment
) -> None:
    registered = gpu_copy.Registered()
    maps = Maps(limit=1, before_unmapping=registered.drop)
    other = Segment.create(4096)

    def use(used: Segment, *, writable: bool = True) -> None:
        fd = os.dup(used.fd) if writable else used.read_only_fd()
        with maps.use(used.id, fd, used.capacity, writable=writable) as view:
            if writable:
                # As a task lends it: a slice of all.
                with view[: used.capacity] as lent:
                    registered.add(driver.device, lent)

    use(segment)
    use(segment)
    assert len(driver.registered) == 1
    with maps.use(segment.id, os.dup(segment.fd), segment.capacity, writable=True):
        maps.forget(segment.id)
        assert len(driver.registered) == 1
    assert driver.registered == []
    use(segment)
    # The limit is reached.
    use(other)
    assert len(driver.registered) == 1
    # What was never registered, and what a device that has failed does not let go of.
    use(segment, writable=False)
    assert driver.registered == []
    driver.fails = "cuMemHostUnregister"
    use(other)
    maps.forget(other.id)
    assert len(maps) == 0
    other.close()


# The driver.


def test_without_a_driver_there_is_no_device() -> None:
    for ask in (lambda: device_of(bytes(16)), lambda: place_of(4096)):
        with pytest.raises(DeviceError, match="there is no CUDA driver"):
            ask()


def test_a_device_is_made_once_whoever_asks(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    class Slow(Device):
        def __init__(self, ordinal: int) -> None:
            made.append(ordinal)
            threading.Event().wait(0.05)

    def count(found: Any) -> None:
        found._obj.value = 2

    monkeypatch.setattr(ipc, "Device", Slow)
    monkeypatch.setattr(ipc, "_uuid", lambda ordinal: bytes([ordinal]) * 16)
    driver.cuDeviceGetCount = count  # type: ignore[attr-defined] # one more call
    threads = [threading.Thread(target=device_of, args=(b"\1" * 16,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]
    with pytest.raises(DeviceError, match="not one of the 2 devices"):
        device_of(b"\7" * 16)
    ipc._device.cache_clear()
