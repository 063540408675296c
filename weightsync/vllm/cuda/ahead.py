"""What of a version lies in staging memory before the version is complete.

Nothing is proved by it. Whoever makes the version live digests its shards after they were read
here, as those that are read later.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightsync.vllm.cuda.staged import send_block

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from weightsync.vllm.cuda.blocks import Block, Blocks
    from weightsync.vllm.cuda.upload import Pace, Uploader
    from weightsync.vllm.live import Targets
    from weightsync.vllm.views import Read

__all__ = ["Ahead"]


@dataclass
class Ahead:
    """Blocks of a version that comes in, in staging memory.

    Attributes:
        ticket: The server's name for it, as long as its shards stay as they came.
        segments: Ids of the segments that it comes into.
        targets: The live destinations of its plan.
        memory: Where it is sent.
        there: The blocks that are there, by where they begin.
        sent: Bytes that were sent for them.
    """

    ticket: str
    segments: tuple[str, ...]
    targets: Targets
    memory: torch.Tensor
    there: set[int] = field(default_factory=set)
    sent: int = 0

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

    def fill(
        self,
        blocks: Blocks,
        read: Read,
        turns: Iterable[int],
        uploader: Uploader,
        pace: Pace,
        stop: Callable[[], bool],
        sent: Callable[[Block], None],
    ) -> None:
        """Send each block when all shards that it is made of have come.

        Args:
            blocks: Of the version.
            read: What they are made of.
            turns: Yields the place in `Layout.largest_first` of each shard, once it has come.
            uploader: Sends.
            pace: Of its stream.
            stop: Asked before every piece; True raises `StoppedError`.
            sent: Called with each block whose copy was queued.
        """
        waiting = _by_turn(blocks.all, read.turns)
        missing = {block.at: len(_turns(block, read.turns)) for block in blocks.all}
        before = uploader.sent
        queued = []
        try:
            for turn in turns:
                for block in waiting[turn]:
                    missing[block.at] -= 1
                    if not missing[block.at] and block.at not in self.there:
                        send_block(block, read.sources, self.memory, uploader, pace, stop)
                        sent(block)
                        queued.append(block.at)
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
