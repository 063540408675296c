"""Bytes on their way from host memory to the device: asynchronous, in pieces, and counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weightsync.vllm.plan.int_views import StoppedError, as_ints, memory_of
from weightsync.vllm.plan.pitched_rows import chunks, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from weightsync.vllm.cuda.cuda_runtime import Runtime

__all__ = ["CHUNK", "StreamThrottle", "Uploader"]

#: Bytes that are under way at a time. With a second piece queued behind it a step of vLLM came to
#: a stop until the queue was empty: on an H200 steps of 5 ms took 20 to 25 while a tensor of 1.1 GB
#: was on its way, in pieces of 16 MiB and of 8; one at a time the longest took 7 to 9.
CHUNK = 16 << 20
_LITTLE = 1 << 20


class StreamThrottle:
    """Has one piece of work done on a stream at a time. Who waits sleeps, without the GIL.

    Args:
        device: Where the work is done; on a CPU it is done at once.
        least: Bytes; less is not waited for: it goes with what comes next.
    """

    def __init__(self, device: torch.device, least: int = _LITTLE) -> None:
        cuda = device.type == "cuda"
        self._queued = 0
        self._least = least
        self._event = torch.cuda.Event(blocking=True) if cuda else None  # type: ignore[no-untyped-call]  # torch's own gap

    def step(self, size: int = CHUNK) -> None:
        """Wait for what the current stream was given, unless it is little.

        Args:
            size: Bytes of the last piece.
        """
        self._queued += size
        if self._queued >= self._least:
            self.drain()

    def steps(self, stop: Callable[[], bool]) -> Callable[[int], None]:
        """Return `step`, which raises instead when the work is to end.

        Args:
            stop: Asked at every step; True raises `StoppedError`.
        """

        def step(size: int) -> None:
            if stop():
                raise StoppedError
            self.step(size)

        return step

    def drain(self) -> None:
        """Wait for all that the current stream was given."""
        self._queued = 0
        if self._event is not None:
            self._event.record()
            self._event.synchronize()


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
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        pace: StreamThrottle,
        stop: Callable[[], bool],
    ) -> None:
        """Send a slice in small pieces, beside whatever else uses the bus.

        Raises:
            StoppedError: `stop` returned True.
        """
        for to, of in self.pieces(target, source):
            if stop():
                raise StoppedError
            self.send(to, of)
            pace.step(of.nbytes)

    def send(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue one copy; a source of another dtype is converted on the device.

        The source must not change before the stream has come so far.

        Args:
            target: On the device.
            source: On the host, of the same shape; if converted, a piece from `pieces`.
        """
        if target.dtype == source.dtype:
            self._copy(as_ints(target), as_ints(source))
        else:
            for to, of in self.pieces(target, source):
                to.copy_(self.fetch(of))

    def fetch(self, source: torch.Tensor) -> torch.Tensor:
        """Return a piece on the device, until the next one is fetched."""
        scratch = self._bounce[: source.nbytes].view(source.dtype).view(source.shape)
        self._copy(as_ints(scratch), as_ints(source))
        return scratch

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
        scratch = self._whole[: whole.nbytes].view(whole.dtype)
        scratch.copy_(whole, non_blocking=True)
        target.copy_(scratch.as_strided(source.shape, source.stride()))
