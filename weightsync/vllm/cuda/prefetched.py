"""What of a version is in staging memory before the version is complete.

Nothing is proved by it: its shards are digested after they were read here. What was copied from a
trainer's GPU is digested here, and believed only when its digests are those of what the server has
received: the trainer may write to its memory once its push has ended.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from weightsync.gpu.ipc import Device, DeviceError, device_with
from weightsync.model.manifest import Layout
from weightsync.vllm.cuda.device_patch import DevicePatch
from weightsync.vllm.cuda.memory_budget import Block, Blocks
from weightsync.vllm.cuda.staged_write import send_block
from weightsync.vllm.cuda.staging_proof import Proof
from weightsync.vllm.cuda.uploader import StreamThrottle, Uploader
from weightsync.vllm.plan.int_views import StoppedError
from weightsync.vllm.plan.live_params import Targets
from weightsync.vllm.plan.load_plan import LoadPlan

if TYPE_CHECKING:
    from weightsync.shm.incoming_version import IpcAddresses
    from weightsync.vllm.plan.staged_tensors import Read


logger = logging.getLogger(__name__)


@dataclass
class PrefetchedBlocks:
    """Blocks of a version that comes in, in staging memory.

    Attributes:
        ticket: The server's name for it, as long as its shards stay as they came.
        there: Where the blocks begin that are there.
        sent: Bytes that were sent for them.
        has_ipc_blocks: Some were copied from a trainer's GPU: their digests alone prove them.
        compared: Content digest of what was live when all of it was compared with that; else "".
        patch: What it changes there; None: a copy is less work, or there was no memory to find it.
    """

    ticket: str
    segments: tuple[str, ...]
    targets: Targets
    memory: torch.Tensor
    there: set[int] = field(default_factory=set)
    sent: int = 0
    has_ipc_blocks: bool = False
    compared: str = ""
    patch: DevicePatch | None = None

    def is_of(
        self, ticket: str, segments: tuple[str, ...], targets: Targets, memory: torch.Tensor
    ) -> bool:
        """Tell whether it is the beginning of a version; "" is no ticket."""
        return (
            bool(ticket)
            and (self.ticket, self.segments) == (ticket, segments)
            and self.targets is targets
            and self.memory is memory
        )

    def forget_patch(self) -> None:
        """Forget what was found: what it was compared with is about to change, or what it holds."""
        self.compared, self.patch = "", None

    def drop(self, blocks: Blocks, plan: LoadPlan, tensors: frozenset[str]) -> None:
        """Forget the blocks that are made of these tensors, and what was found with them."""
        self.forget_patch()
        self.there -= {
            block.at
            for block in blocks.all
            if any(plan.slices[part.index].tensor in tensors for part in block.parts)
        }

    def fill(
        self,
        blocks: Blocks,
        read: Read,
        turns: Iterable[tuple[int, IpcAddresses | None]],
        uploader: Uploader,
        pace: StreamThrottle,
        stop: Callable[[], bool],
        sent: Callable[[Block], None],
        copier: IpcCopier | None,
    ) -> None:
        """Send each block as soon as all shards that it is made of lie on a GPU, or have come.

        Returns when no more will come, or all blocks are there. `turns` is
        `PrefetchRequest.arrivals`; `pace` is of the uploader's stream. `sent` is called with each
        block whose copy was queued. Without a `copier`, blocks come from segments alone. Raises
        StoppedError when `stop` returns True.
        """
        waiting = _by_turn(blocks.all, read.turns)
        missing = {block.at: len(_turns(block, read.turns)) for block in blocks.all}
        unknown = dict(missing)
        before = uploader.sent
        queued: set[int] = set()
        try:
            for turn, extents in turns:
                if extents is not None and copier is not None:
                    copier.note(turn, extents)
                left = missing if extents is None else unknown
                for block in waiting[turn]:
                    left[block.at] -= 1
                    if left[block.at] or block.at in self.there or block.at in queued:
                        continue
                    if extents is None:
                        send_block(block, read.sources, self.memory, uploader, pace, stop)
                    elif copier is None or not copier.take(block, self.memory, stop):
                        continue
                    else:
                        self.has_ipc_blocks = True
                    sent(block)
                    queued.add(block.at)
                if len(self.there) + len(queued) == len(blocks.all):
                    break
        finally:
            # Nothing may still be under way when its source is unmapped.
            pace.drain()
            self.there.update(queued)
            self.sent += uploader.sent - before


def _by_turn(blocks: Sequence[Block], turns: Sequence[int]) -> dict[int, list[Block]]:
    found = defaultdict(list)
    for block in blocks:
        for turn in _turns(block, turns):
            found[turn].append(block)
    return found


def _turns(block: Block, turns: Sequence[int]) -> set[int]:
    return {turns[part.index] for part in block.parts}


#: Bytes that are under way at a time: what else runs on an H200 waits for 0.2 ms of them.
_PIECE = 256 << 20


class IpcMappings:
    """Opens what trainers tell of, for one version, to copy it to `memory` of this rank."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        # Each wait takes its time beside a worker's own thread: many tensors share one.
        self._pace = StreamThrottle(memory.device, _PIECE)
        self._opened = contextlib.ExitStack()
        self._device: Device | None = None
        #: Address and size of each allocation, by its handle.
        self._bases: dict[bytes, tuple[int, int]] = {}
        self._tensors: dict[str, tuple[bytes, int]] = {}
        self._refused = False

    @classmethod
    @contextlib.contextmanager
    def until_done(cls, memory: torch.Tensor) -> Iterator[IpcMappings]:
        """Yield one for the body; what it opened is closed soon after."""
        mappings = cls(memory)
        try:
            yield mappings
        finally:
            if mappings._bases:
                # Closing 155 allocations took 40 ms beside generation; nobody waits for it.
                threading.Thread(target=mappings.close, name="weightsync", daemon=True).start()

    def note(self, names: Sequence[str], where: IpcAddresses) -> None:
        self._tensors |= dict(zip(names, where, strict=True))

    def copy(self, name: str, target: torch.Tensor, stop: Callable[[], bool]) -> bool:
        """Queue a copy of a whole tensor to a contiguous `target`.

        Returns False if the tensor was not noted or cannot be reached. Raises StoppedError when
        `stop` returns True.
        """
        if self._refused or name not in self._tensors:
            return False
        handle, offset = self._tensors[name]
        try:
            base, size = self._open(handle)
            if offset + target.nbytes > size:
                raise DeviceError(f"{target.nbytes} bytes from {offset} on are not within {size}")
            self._copy(target, base + offset, stop)
        except DeviceError as error:
            # What one of them meets, the others would.
            self._refused = True
            logger.info("weightsync: a version is read from host memory: %s", error)
            return False
        return True

    def _open(self, handle: bytes) -> tuple[int, int]:
        if self._device is None:
            self._device = device_with(self._memory.data_ptr())
        if handle not in self._bases:
            self._bases[handle] = self._opened.enter_context(self._device.opened(handle))
        return self._bases[handle]

    def _copy(self, target: torch.Tensor, source: int, stop: Callable[[], bool]) -> None:
        assert self._device is not None  # noqa: S101 - what was opened, was opened by it
        stream = _stream(target.device)
        for at in range(0, target.nbytes, _PIECE):
            if stop():
                raise StoppedError
            size = min(_PIECE, target.nbytes - at)
            self._device.copy(target.data_ptr() + at, source + at, size, stream)
            self._pace.step(size)

    def close(self) -> None:
        """Close all, on any thread; nothing may be under way."""
        self._bases.clear()
        self._opened.close()


class IpcCopier:
    """Copies blocks of a version from trainers' GPUs, as far as `proof` can prove them."""

    def __init__(self, mappings: IpcMappings, layout: Layout, plan: LoadPlan, proof: Proof) -> None:
        self._mappings = mappings
        self._layout = layout
        self._plan = plan
        self._proof = proof

    def note(self, turn: int, where: IpcAddresses) -> None:
        """Take note of where a shard lies; `turn` is its place in `Layout.largest_first`."""
        tensors = self._layout.by_shard[self._layout.largest_first[turn]]
        self._mappings.note([t.name for t in tensors if t.end > t.begin], where)

    def take(self, block: Block, memory: torch.Tensor, stop: Callable[[], bool]) -> bool:
        """Queue the copies of a block of which all was noted; return False: it cannot be."""
        if not self._proof.covers(block):
            return False
        row = block.staged(memory).reshape(-1)
        for part in block.parts:
            item = self._plan.slices[part.index]
            target = row[part.begin : part.begin + item.target.numel]
            if not self._mappings.copy(item.tensor, target, stop):
                return False
        return True


def _stream(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    handle: int = torch.cuda.current_stream(device).cuda_stream
    return handle
