"""What of a version lies in staging memory before the version is complete.

Nothing is proved by it. Whoever makes the version live digests its shards after they were read
here, as those that are read later; what was copied from a trainer's GPU is digested here.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightsync.vllm.cuda.staged_write import send_block

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from weightsync.shm.incoming_version import IpcAddresses
    from weightsync.vllm.cuda.blocks import Block, Blocks
    from weightsync.vllm.cuda.device_patch import DevicePatch
    from weightsync.vllm.cuda.ipc_copy import IpcCopier
    from weightsync.vllm.cuda.uploader import StreamThrottle, Uploader
    from weightsync.vllm.plan.live_params import Targets
    from weightsync.vllm.plan.load_plan import LoadPlan
    from weightsync.vllm.plan.view_cache import Read

__all__ = ["PrefetchedBlocks"]


@dataclass
class PrefetchedBlocks:
    """Blocks of a version that comes in, in staging memory.

    Attributes:
        ticket: The server's name for it, as long as its shards stay as they came.
        segments: Ids of the segments that it comes into.
        targets: The live destinations of its plan.
        memory: Where it is sent.
        there: The blocks that are there, by where they begin.
        sent: Bytes that were sent for them.
        has_ipc_blocks: Some were copied from a trainer's GPU: their digests alone prove them.
        compared: Content digest of what was live when all of it was compared with that; "": it was
            not.
        patch: What it changes there; None: so much that a copy is less work, or there was no memory
            to find it.
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

        Returns when no more will come, or all blocks are there.

        Args:
            blocks: Of the version.
            read: What they are made of.
            turns: Yields the place in `Layout.largest_first` of each shard, once it has come, and
                before that, if it lies on a GPU, with where.
            uploader: Sends.
            pace: Of its stream.
            stop: Asked before every piece; True raises `StoppedError`.
            sent: Called with each block whose copy was queued.
            copier: Copies from GPUs; None: nobody does.
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
