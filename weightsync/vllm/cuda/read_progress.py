"""How far a rank has read a version, told while it reads on.

Who is told digests the bytes of those shards meanwhile, to prove what was read: so it must not be
told before the last of those bytes was read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from weightsync.vllm.cuda.blocks import Block
    from weightsync.vllm.cuda.uploader import StreamThrottle

__all__ = ["ReadProgress"]

#: Bytes that are read between two words: for each the device has to come to an end.
_STEP = 256 << 20


@dataclass
class ReadProgress:
    """Tells of how many shards, in the order of `Layout.largest_first`, nothing is read any more.

    Attributes:
        turns: Of each source, the place of its shard in that order.
        count: How many shards there are.
        report: Called with that number, which only rises.
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
