"""Bytes on their way from host memory to the device: asynchronous, in pieces, and counted.

A shard is reported only when its last byte was read: whoever is told then digests its bytes, to
prove what was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from weightsync.model.tensor_bits import as_ints
from weightsync.vllm.plan.int_views import StoppedError, memory_of
from weightsync.vllm.plan.load_plan import chunks, rows_of

if TYPE_CHECKING:
    from weightsync.vllm.cuda.cuda_runtime import Runtime
    from weightsync.vllm.cuda.memory_budget import Block


#: Bytes that are under way at a time. With a second piece queued behind it a step of vLLM came to
#: a stop until the queue was empty: on an H200 steps of 5 ms took 20 to 25 while a tensor of 1.1 GB
#: was on its way, in pieces of 16 MiB and of 8; one at a time the longest took 7 to 9.
CHUNK = 16 << 20
_LITTLE = 1 << 20


class StreamThrottle:
    """Has one piece of work done on a stream at a time. Who waits sleeps, without the GIL.

    Less than `least` bytes are not waited for: they go with what comes next.
    """

    def __init__(self, device: torch.device, least: int = _LITTLE) -> None:
        cuda = device.type == "cuda"
        self._queued = 0
        self._least = least
        self._event = torch.cuda.Event(blocking=True) if cuda else None  # type: ignore[no-untyped-call]  # torch's own gap

    def step(self, size: int = CHUNK) -> None:
        """Wait for what the current stream was given, last `size` bytes, unless it is little."""
        self._queued += size
        if self._queued >= self._least:
            self.drain()

    def steps(self, stop: Callable[[], bool]) -> Callable[[int], None]:
        """Return `step`, which raises `StoppedError` instead when `stop` returns True."""

        def step(size: int) -> None:
            if stop():
                raise StoppedError
            self.step(size)

        return step

    def drain(self) -> None:
        self._queued = 0
        if self._event is not None:
            self._event.record()
            self._event.synchronize()


class Uploader:
    """Sends slices of mapped segments to the device, on the current stream.

    `bounce` is memory of the device, half for what is converted and half for what is cut there.
    Without a `runtime` rows are cut on the device.
    """

    def __init__(self, bounce: torch.Tensor, runtime: Runtime | None) -> None:
        self.sent = 0
        self._bounce, self._whole = bounce.chunk(2)
        self._runtime = runtime

    def pieces(
        self, target: torch.Tensor, source: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return chunks(target, source, self._bounce.nbytes)

    def send_all(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        pace: StreamThrottle,
        stop: Callable[[], bool],
    ) -> None:
        """Send a slice in small pieces, beside whatever else uses the bus; `stop` may end it."""
        for to, of in self.pieces(target, source):
            if stop():
                raise StoppedError
            self.send(to, of)
            pace.step(of.nbytes)

    def send(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue one copy; a source of another dtype is converted on the device.

        The source must not change before the stream has come so far; one to be converted is a piece
        from `pieces`.
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


#: Bytes that are read between two words: for each the device has to come to an end.
_STEP = 256 << 20


@dataclass
class ReadProgress:
    """Reports how many shards, in the order of `Layout.largest_first`, are not read any more.

    `turns` has the place of each source's shard in that order. The number reported only rises.
    """

    turns: Sequence[int]
    count: int
    report: Callable[[int], None]
    _reported: int = 0
    _since: int = 0

    def in_order(self, blocks: Iterable[Block]) -> list[Block]:
        """Return blocks in the order in which they are to be read: earlier shards first."""
        return sorted(blocks, key=self._first)

    def before(self, block: Block, pace: StreamThrottle) -> None:
        """Tell, if that is worth it, what neither this block nor those after it read."""
        first = self._first(block)
        if first > self._reported and self._since >= _STEP:
            # What was queued may still be on its way from those shards.
            pace.drain()
            self._reported, self._since = first, 0
            self.report(first)
        self._since += block.nbytes

    def end(self) -> None:
        """Tell that all was read. Nothing may be under way."""
        self.report(self.count)

    def _first(self, block: Block) -> int:
        return min(self.turns[part.index] for part in block.parts)
