"""Bytes on their way from host memory to the device: asynchronous, in pieces, and counted."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from weightsync.vllm.cuda.rows import chunks, rows_of
from weightsync.vllm.words import StoppedError, memory_of, words_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from weightsync.vllm.cuda.runtime import Runtime

__all__ = ["CHUNK", "Pace", "Uploader"]

#: Bytes that are under way as one, and how many at once: a copy of vLLM that comes meanwhile waits
#: for no more than that.
CHUNK = 16 << 20
_OUTSTANDING = 3


class Pace:
    """Keeps at most three pieces of work queued on a stream. Who waits sleeps, without the GIL.

    Args:
        device: Where the work is done; on a CPU it is done at once.
    """

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._free: deque[torch.cuda.Event] = deque()
        for _ in range(_OUTSTANDING if cuda else 0):
            self._free.append(torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]  # torch's own gap
        self._cuda = cuda
        self._queued: deque[torch.cuda.Event] = deque()

    def step(self) -> None:
        """Take note of work that the current stream was given; wait for what came before."""
        if not self._cuda:
            return
        event = self._free.popleft()
        event.record()
        self._queued.append(event)
        if len(self._queued) >= _OUTSTANDING:
            self._wait()

    def drain(self) -> None:
        """Wait for all."""
        while self._queued:
            self._wait()

    def _wait(self) -> None:
        event = self._queued.popleft()
        event.synchronize()
        self._free.append(event)


class Uploader:
    """Sends slices of mapped segments to the device, on the current stream.

    Args:
        bounce: Memory of the device, a half for what is converted and one for what is cut there.
        runtime: Copies rows; None: they are cut on the device.

    Attributes:
        sent: Bytes so far.
    """

    def __init__(self, bounce: torch.Tensor, runtime: Runtime | None) -> None:
        self.sent = 0
        self._bounce, self._whole = bounce.chunk(2)
        self._runtime = runtime

    def pieces(
        self, target: torch.Tensor, source: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield both sides in pieces that `send` takes."""
        return chunks(target, source, self._bounce.nbytes)

    def send_all(
        self, target: torch.Tensor, source: torch.Tensor, pace: Pace, stop: Callable[[], bool]
    ) -> None:
        """Send a slice in small pieces, beside whatever else uses the bus.

        Raises:
            StoppedError: `stop` returned True.
        """
        for to, of in self.pieces(target, source):
            if stop():
                raise StoppedError
            self.send(to, of)
            pace.step()

    def send(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue one copy; a source of another dtype is converted on the device.

        The source must not change before the stream has come so far.

        Args:
            target: On the device.
            source: On the host, of the same shape; if converted, a piece from `pieces`.
        """
        if target.dtype == source.dtype:
            self._copy(words_of(target), words_of(source))
        else:
            for to, of in self.pieces(target, source):
                to.copy_(self.fetch(of))

    def fetch(self, source: torch.Tensor) -> torch.Tensor:
        """Return a piece on the device, until the next one is fetched."""
        room = self._bounce[: source.nbytes].view(source.dtype).view(source.shape)
        self._copy(words_of(room), words_of(source))
        return room

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if target.is_contiguous() and source.is_contiguous():
            self.sent += source.nbytes
            target.copy_(source, non_blocking=True)
            return
        rows = rows_of(target, source) if self._runtime is not None else None
        if rows is not None and self._runtime is not None:
            self.sent += source.nbytes
            self._runtime.copy_rows(target, source, rows)
            return
        for to, of in self.pieces(target, source):
            self._cut(to, of)

    def _cut(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Send all from the first element to the last, and take what is wanted there."""
        whole = memory_of(source)
        self.sent += whole.nbytes
        if whole.nbytes > self._whole.nbytes:
            # One row is as long. Through a temporary of torch, which waits.
            target.copy_(source)
            return
        room = self._whole[: whole.nbytes].view(whole.dtype)
        room.copy_(whole, non_blocking=True)
        target.copy_(room.as_strided(source.shape, source.stride()))
