"""A trainer's tensors on a GPU of this host, copied from where they lie, device to device.

What is copied so is believed only when its digests are those of what the server has received: the
trainer may write to its memory as soon as its push has ended.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING

import torch

from weightsync.gpu.ipc import DeviceError, device_with
from weightsync.vllm.cuda.uploader import StreamThrottle
from weightsync.vllm.plan.int_views import StoppedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from weightsync.gpu.ipc import Device
    from weightsync.model.manifest import Layout
    from weightsync.shm.incoming_version import IpcAddresses
    from weightsync.vllm.cuda.blocks import Block
    from weightsync.vllm.cuda.staging_proof import Proof
    from weightsync.vllm.plan.load_plan import LoadPlan

__all__ = ["IpcCopier", "IpcMappings"]

logger = logging.getLogger(__name__)

#: Bytes that are under way at a time: what else runs on an H200 waits for 0.2 ms of them.
_PIECE = 256 << 20


class IpcMappings:
    """Opens what trainers tell of, for one version; closes all of it at the end.

    Args:
        memory: Of this rank, where it is copied to.
    """

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
        """Take note of where tensors lie, in the order of its places."""
        self._tensors |= dict(zip(names, where, strict=True))

    def copy(self, name: str, target: torch.Tensor, stop: Callable[[], bool]) -> bool:
        """Queue a copy of a whole tensor; return False where it cannot be reached from here.

        Args:
            name: Of a tensor that was noted, or of another one.
            target: Takes all its bytes, in a row.
            stop: Asked before every piece; True raises `StoppedError`.
        """
        if self._refused or name not in self._tensors:
            return False
        handle, offset = self._tensors[name]
        try:
            base, size = self._open(handle)
            if offset + target.nbytes > size:
                msg = f"{target.nbytes} bytes from {offset} on are not within {size}"
                raise DeviceError(msg)
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
    """Copies blocks of one version from trainers' GPUs.

    Args:
        mappings: Copies tensors.
        layout: Of the version.
        plan: Of its layout.
        proof: Digests what was copied: what it does not prove is not taken.
    """

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
