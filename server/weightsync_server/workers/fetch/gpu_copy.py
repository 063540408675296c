"""A collector, and its process: it fills segments from the memory of a trainer's GPU.

Its mappings stay registered with CUDA while segments are reused, except for memory that a trainer
writes to itself, because a mapping is a writer.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from weightsync.errors import Reason, WeightSyncError
from weightsync.gpu.ipc import Device, DeviceError, Stream, device_of
from weightsync.wire.child_channel import read_note
from weightsync_server.workers.fetch.fetch_api import GpuSource, StridedPiece
from weightsync_server.workers.fetch.fetch_pool import FetcherPool
from weightsync_server.workers.fetch.shard_tasks import BrokenError, look
from weightsync_server.workers.runtime.child_process import ChildProcess

if TYPE_CHECKING:
    from weightsync.shm.segments import Segment


logger = logging.getLogger(__name__)


#: Copies at once: while some run, the memory of the next is opened. With three, which all use the
#: bus and so end together, it stood idle for a seventh of the time.
_AT_ONCE = 6
#: Bytes, and seconds of waiting, between two looks at whether the server still wants the result.
_STEP, _LOOK_S = 64 << 20, 0.25
#: CUDA's CU_DEVICE_ATTRIBUTE_MAX_PITCH is 2 GiB - 1 on every device so far.
_MOST_STRIDE = (1 << 31) - 1


def read_source(fd: int) -> GpuSource:
    source = GpuSource(**read_note(fd))
    return source._replace(strided=[StridedPiece(*piece) for piece in source.strided])


class Registered:
    """Mappings that a device may write to, until they are unmapped. Any thread may call."""

    def __init__(self) -> None:
        self._devices: dict[int, Device] = {}

    def add(self, device: Device, view: memoryview) -> None:
        if id(view.obj) not in self._devices:
            device.register(view)
            self._devices[id(view.obj)] = device

    def drop(self, view: memoryview) -> None:
        device = self._devices.pop(id(view.obj), None)
        if device is not None:
            with contextlib.suppress(DeviceError):
                device.unregister(view)


class Opened:
    """Allocations of other processes, open while anything of the same trainer is to be copied.

    Closing one waits for every copy under way on its device: closing them after each shard kept the
    bus idle for a tenth of a push. Once all copies for a trainer have ended, none is open, and it
    may free them. Any thread may call. At most `at_once` copies run at a time.
    """

    def __init__(self, at_once: int = _AT_ONCE) -> None:
        self._lock = threading.Lock()
        self._loans: dict[str, _Loan] = {}
        self._at_once = at_once
        self._running = 0
        #: Who waits: the number of its copy among those of its trainer, and in the order of coming.
        self._waiting: list[_Turn] = []
        self._order = itertools.count()
        #: The number of the copy that had the last turn.
        self._number = 0

    @contextlib.contextmanager
    def of(self, trainer: str, stop: threading.Event) -> Iterator[_Loan]:
        """Lend what opens allocations of a trainer, for one copy, when that has its turn.

        Trainers take turns, so that the parts of a shard that several bring come together. One that
        comes later has its first turn after those that wait for their next.
        """
        with self._lock:
            loan = self._loans.get(trainer)
            if loan is None:
                loan = self._loans[trainer] = _Loan(self._number + 1)
            loan.users += 1
            turn = _Turn(loan.next_number(), next(self._order), threading.Event())
            heapq.heappush(self._waiting, turn)
            self._give_turns()
        try:
            while not turn.come.wait(_LOOK_S):
                look(stop)
            yield loan
        finally:
            with self._lock:
                self._end(turn)
                loan.users -= 1
                last = not loan.users
                if last:
                    del self._loans[trainer]
            if last:
                loan.close()

    def _give_turns(self) -> None:
        while self._waiting and self._running < self._at_once:
            turn = heapq.heappop(self._waiting)
            self._number = turn.number
            self._running += 1
            turn.come.set()

    def _end(self, turn: _Turn) -> None:
        if turn.come.is_set():
            self._running -= 1
        else:
            self._waiting.remove(turn)
            heapq.heapify(self._waiting)
        self._give_turns()


class _Turn(NamedTuple):
    number: int
    order: int
    come: threading.Event


class _Loan:
    """What is open of one trainer.

    `number` is that of its first copy. `users` counts the copies that wait or run.
    """

    def __init__(self, number: int) -> None:
        self.users = 0
        self._numbers = itertools.count(number)
        self._lock = threading.Lock()
        self._open = contextlib.ExitStack()
        self._places: dict[tuple[Device, bytes], tuple[int, int]] = {}

    def next_number(self) -> int:
        return next(self._numbers)

    def open(self, device: Device, handle: bytes) -> tuple[int, int]:
        """Return address and size of what a handle opens; a DeviceError: it opens nothing here."""
        with self._lock:
            place = self._places.get((device, handle))
            if place is None:
                place = self._open.enter_context(device.opened(handle))
                self._places[device, handle] = place
            return place

    def close(self) -> None:
        self._open.close()


def collect(
    view: memoryview,
    source: GpuSource,
    registered: Registered,
    opened: Opened,
    stop: threading.Event,
) -> None:
    """Fill parts of a segment from allocations of another process on a GPU.

    `view` is the whole mapping, which `registered` keeps known to the device. Raises NOT_SUPPORTED
    when the memory cannot be reached from here, REQUEST_INVALID for a piece outside of it, and
    BrokenError when the device failed.
    """
    with opened.of(source.trainer, stop) as loan:
        look(stop)
        try:
            device = device_of(bytes.fromhex(source.device))
            registered.add(device, view)
            places = [loan.open(device, bytes.fromhex(handle)) for handle in source.handles]
        except DeviceError as error:
            raise WeightSyncError(
                Reason.NOT_SUPPORTED, f"the trainer's GPU memory cannot be opened here: {error}"
            ) from error
        sizes = [size for _, size in places]
        for number, offset, at, size in source.pieces:
            _check(offset + size, sizes[number], at + size, view.nbytes)
        for piece in source.strided:
            end = piece.at + (piece.rows - 1) * piece.stride + piece.run
            _check(piece.offset + piece.rows * piece.run, sizes[piece.handle], end, view.nbytes)
        try:
            with device.stream() as stream:
                for number, offset, at, size in source.pieces:
                    _copy(stream, view[at : at + size], places[number][0] + offset, stop)
                for piece in source.strided:
                    _copy_rows(stream, view, piece, places[piece.handle][0] + piece.offset, stop)
        except DeviceError as error:
            raise BrokenError(
                Reason.FETCHER_FAILED, f"copying from the trainer's GPU failed: {error}; push again"
            ) from error


def _check(end: int, size: int, target_end: int, room: int) -> None:
    if end > size or target_end > room:
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            f"bytes up to {end} are beyond the {size} bytes that the trainer declared; push again",
        )


def _copy_rows(
    stream: Stream, view: memoryview, piece: StridedPiece, source: int, stop: threading.Event
) -> None:
    # Rows that lie further apart than a copy of several may have them go one by one.
    step = max(1, _STEP // piece.run) if piece.stride <= _MOST_STRIDE else 1
    for row in range(0, piece.rows, step):
        look(stop)
        rows = min(step, piece.rows - row)
        target = view[piece.at + row * piece.stride :]
        stride = piece.stride if rows > 1 else piece.run
        stream.copy_rows(target, stride, source + row * piece.run, piece.run, rows)
        if rows * piece.run >= _STEP:
            stream.wait()


def _copy(stream: Stream, view: memoryview, source: int, stop: threading.Event) -> None:
    for at in range(0, len(view), _STEP):
        look(stop)
        piece = view[at : at + _STEP]
        stream.copy(piece, source + at)
        if len(view) > _STEP:
            stream.wait()


#: Copies that the process knows of: it keeps open what any of them needs, and has them take turns.
_KNOWN = 64
#: A bus is a hundred times as fast; what takes longer is stuck, and its trainer waits for it.
_MIN_BYTES_PER_S = 100e6


class GpuFetchPool(FetcherPool):
    """Fills segments from GPUs, by one process for each GPU that it has used.

    Each has a CUDA context, which takes about half a gigabyte of the GPU.
    """

    def __init__(self, on_restart: Callable[[], None] = lambda: None) -> None:
        super().__init__(1, on_restart=on_restart, min_bytes_per_s=_MIN_BYTES_PER_S)
        self._starting = asyncio.Lock()
        self._closed = False
        #: Bytes of the copies that wait or run.
        self._load = 0

    async def collect(self, segment: Segment, source: GpuSource) -> None:
        async with self._starting:
            if not self._running and not self._closed:
                await self._start()
        self._load += segment.capacity
        try:
            await super().collect(segment, source)
        finally:
            self._load -= segment.capacity

    async def close(self) -> None:
        """End the process for good, also one that is being started."""
        self._closed = True
        async with self._starting:
            await self.stop()

    def _time_for(self, size: int) -> float:
        # The process has a copy before that has its turn.
        return super()._time_for(max(size, self._load))

    async def _start(self) -> None:
        try:
            await self.start()
        except WeightSyncError as error:
            logger.warning("nothing is copied from trainers' GPUs: %s", error.message)
            # Nothing was written, so the trainer can do it.
            raise WeightSyncError(Reason.NOT_SUPPORTED, error.message) from error

    def _lanes(self, process: ChildProcess) -> Sequence[Coroutine[Any, Any, None]]:
        return [self._lane(process, self._digests) for _ in range(_KNOWN)]
