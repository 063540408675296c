"""What a collector does with a segment: fill it from the memory of a trainer's GPU.

Its mappings are registered with CUDA once and stay so while the segments are reused: for memory
that a trainer writes to itself that cannot be, because a mapping is a writer.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, NamedTuple

from weightsync.device_memory import DeviceError, device_of
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.fetchers.tasks import BrokenError, look

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from weightsync.device_memory import Device, Stream

__all__ = ["Order", "Piece", "Registered", "collect", "read_order"]

#: Bytes between two looks at whether the server still wants the result.
_STEP = 64 << 20

#: Number of the handle, offset in what it opens, offset in the segment, size; in bytes.
Piece = tuple[int, int, int, int]


class Order(NamedTuple):
    """What is to be copied.

    Attributes:
        uuid: Of the device.
        handles: Open the allocations.
        pieces: What goes where.
    """

    uuid: bytes
    handles: Sequence[bytes]
    pieces: Sequence[Piece]


def read_order(fd: int) -> Order:
    """Return what `weightsync_server.fetchers.asking.Asking.collect` has noted in a file."""
    told = json.loads(os.pread(fd, os.fstat(fd).st_size, 0))
    handles = [bytes.fromhex(handle) for handle in told["handles"]]
    return Order(bytes.fromhex(told["device"]), handles, told["pieces"])


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


def collect(view: memoryview, order: Order, registered: Registered, stop: threading.Event) -> None:
    """Fill parts of a segment from allocations of another process on a GPU.

    Args:
        view: The whole mapping of the segment.
        order: What goes where.
        registered: Keeps the mapping known to the device.
        stop: Set when the server no longer wants it.

    Raises:
        WeightSyncError: NOT_SUPPORTED where the memory cannot be reached from here; REQUEST_INVALID
            for a piece that lies outside of it.
        BrokenError: The device failed.
        Cancelled: The server no longer wants it.
    """
    with contextlib.ExitStack() as opened:
        try:
            device = device_of(order.uuid)
            registered.add(device, view)
            places = [opened.enter_context(device.opened(handle)) for handle in order.handles]
        except DeviceError as error:
            raise WeightSyncError(
                Reason.NOT_SUPPORTED, f"the trainer's GPU memory cannot be opened here: {error}"
            ) from error
        _check(order.pieces, [size for _, size in places], view.nbytes)
        try:
            with device.stream() as stream:
                for number, offset, at, size in order.pieces:
                    _copy(stream, view[at : at + size], places[number][0] + offset, stop)
        except DeviceError as error:
            raise BrokenError(
                Reason.FETCHER_FAILED, f"copying from the trainer's GPU failed: {error}; push again"
            ) from error


def _check(pieces: Sequence[Piece], sizes: Sequence[int], room: int) -> None:
    for number, offset, at, size in pieces:
        if offset + size > sizes[number] or at + size > room:
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                f"{size} bytes from {offset} on are not within the {sizes[number]} bytes that the "
                "trainer told of; push again",
            )


def _copy(stream: Stream, view: memoryview, source: int, stop: threading.Event) -> None:
    for at in range(0, len(view), _STEP):
        look(stop)
        piece = view[at : at + _STEP]
        stream.copy(piece, source + at)
        if len(view) > _STEP:
            stream.wait()
