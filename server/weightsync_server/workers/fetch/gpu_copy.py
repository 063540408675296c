"""What a collector does with a segment: fill it from the memory of a trainer's GPU.

Its mappings are registered with CUDA once and stay so while the segments are reused: for memory
that a trainer writes to itself that cannot be, because a mapping is a writer.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
from typing import TYPE_CHECKING, NamedTuple

from weightsync.errors import Reason, WeightSyncError
from weightsync.gpu.ipc import DeviceError, device_of
from weightsync.wire.notes import read_note
from weightsync_server.workers.fetch.fetch_api import StridedPiece
from weightsync_server.workers.fetch.shard_tasks import BrokenError, look

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from weightsync.gpu.ipc import Device, Stream
    from weightsync_server.workers.fetch.fetch_api import Piece

__all__ = ["Opened", "Order", "Registered", "collect", "read_order"]

#: Copies at once: while some run, the memory of the next is opened. With three, which all use the
#: bus and so end together, it stood idle for a seventh of the time.
_AT_ONCE = 6
#: Bytes, and seconds of waiting, between two looks at whether the server still wants the result.
_STEP, _LOOK_S = 64 << 20, 0.25
#: CUDA's CU_DEVICE_ATTRIBUTE_MAX_PITCH is 2 GiB - 1 on every device so far.
_MOST_STRIDE = (1 << 31) - 1


class Order(NamedTuple):
    """What is to be copied.

    Attributes:
        trainer: Names whose memory it is.
        uuid: Of the device.
        handles: Open the allocations.
        pieces: What goes where.
        strided: And so do these.
    """

    trainer: str
    uuid: bytes
    handles: Sequence[bytes]
    pieces: Sequence[Piece]
    strided: Sequence[StridedPiece] = ()


def read_order(fd: int) -> Order:
    """Return what `FetchApi.collect` has noted in a file."""
    document = read_note(fd)
    handles = [bytes.fromhex(handle) for handle in document["handles"]]
    strided = [StridedPiece(*piece) for piece in document["strided"]]
    uuid = bytes.fromhex(document["device"])
    return Order(document["trainer"], uuid, handles, document["pieces"], strided)


class Registered:
    """Mappings that a device may write to, until they are unmapped. Any thread may call."""

    def __init__(self) -> None:
        self._devices: dict[int, Device] = {}

    def add(self, device: Device, view: memoryview) -> None:
        """Register a whole mapping, once.

        Raises:
            DeviceError: CUDA refused.
        """
        if id(view.obj) not in self._devices:
            device.register(view)
            self._devices[id(view.obj)] = device

    def drop(self, view: memoryview) -> None:
        """Let go of a mapping that is about to be unmapped."""
        device = self._devices.pop(id(view.obj), None)
        if device is not None:
            with contextlib.suppress(DeviceError):
                device.unregister(view)


class Opened:
    """Allocations of other processes, open while anything of the same trainer is to be copied.

    To close one waits for every copy under way on its device, so that closing each shard's kept the
    bus idle for a tenth of a push. Once all copies for a trainer have ended none of its allocations
    is open, and it may free them. Any thread may call.

    Args:
        at_once: How many copies.
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

        Trainers have turns one after the other: of a shard that several bring the parts come
        together, and it is proved while the next is copied. One that comes later has its first turn
        after those that wait for their next: nobody overtakes by a new name.

        Args:
            trainer: Whose memory it is.
            stop: Set when nobody wants the copy any more.

        Raises:
            Cancelled: Nobody wanted it before its turn.
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

    Args:
        number: Of its first copy.

    Attributes:
        users: Copies that wait or run.
    """

    def __init__(self, number: int) -> None:
        self.users = 0
        self._numbers = itertools.count(number)
        self._lock = threading.Lock()
        self._open = contextlib.ExitStack()
        self._places: dict[tuple[Device, bytes], tuple[int, int]] = {}

    def next_number(self) -> int:
        """Return the number of one more copy."""
        return next(self._numbers)

    def open(self, device: Device, handle: bytes) -> tuple[int, int]:
        """Return address and size of what a handle opens.

        Raises:
            DeviceError: It opens nothing here.
        """
        with self._lock:
            place = self._places.get((device, handle))
            if place is None:
                place = self._open.enter_context(device.opened(handle))
                self._places[device, handle] = place
            return place

    def close(self) -> None:
        self._open.close()


def collect(
    view: memoryview, order: Order, registered: Registered, opened: Opened, stop: threading.Event
) -> None:
    """Fill parts of a segment from allocations of another process on a GPU.

    Args:
        view: The whole mapping of the segment.
        order: What goes where.
        registered: Keeps the mapping known to the device.
        opened: Keeps what was opened for other copies of the same trainer.
        stop: Set when the server no longer wants it.

    Raises:
        WeightSyncError: NOT_SUPPORTED where the memory cannot be reached from here; REQUEST_INVALID
            for a piece that lies outside of it.
        BrokenError: The device failed.
        Cancelled: The server no longer wants it.
    """
    with opened.of(order.trainer, stop) as loan:
        look(stop)
        try:
            device = device_of(order.uuid)
            registered.add(device, view)
            places = [loan.open(device, handle) for handle in order.handles]
        except DeviceError as error:
            raise WeightSyncError(
                Reason.NOT_SUPPORTED, f"the trainer's GPU memory cannot be opened here: {error}"
            ) from error
        sizes = [size for _, size in places]
        for number, offset, at, size in order.pieces:
            _check(offset + size, sizes[number], at + size, view.nbytes)
        for piece in order.strided:
            end = piece.at + (piece.rows - 1) * piece.stride + piece.run
            _check(piece.offset + piece.rows * piece.run, sizes[piece.handle], end, view.nbytes)
        try:
            with device.stream() as stream:
                for number, offset, at, size in order.pieces:
                    _copy(stream, view[at : at + size], places[number][0] + offset, stop)
                for piece in order.strided:
                    _copy_rows(stream, view, piece, places[piece.handle][0] + piece.offset, stop)
        except DeviceError as error:
            raise BrokenError(
                Reason.FETCHER_FAILED, f"copying from the trainer's GPU failed: {error}; push again"
            ) from error


def _check(end: int, size: int, target_end: int, room: int) -> None:
    if end > size or target_end > room:
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            f"bytes up to {end} are not within the {size} bytes that the trainer told of; push "
            "again",
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
