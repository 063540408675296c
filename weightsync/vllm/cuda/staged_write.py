"""A version that lies in device memory already: copied and compared there in a few milliseconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightsync.gpu.spans import fits
from weightsync.vllm.apply.writes import write_each
from weightsync.vllm.cuda.bit_compare import Comparison, limit_of
from weightsync.vllm.cuda.span_launch import Spans

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    import torch

    from weightsync.gpu.device_kernels import Kernels
    from weightsync.vllm.apply.parallel import SliceThreads
    from weightsync.vllm.cuda.blocks import Block, Blocks
    from weightsync.vllm.cuda.read_progress import ReadProgress
    from weightsync.vllm.cuda.uploader import StreamThrottle, Uploader
    from weightsync.vllm.plan.live_params import Targets

__all__ = ["Staged", "send_block", "send_blocks"]


@dataclass(eq=False)
class Staged:
    """Writes blocks from staging memory.

    Attributes:
        targets: The live destinations.
        blocks: What to write.
        memory: Where it lies.
        mask: Scratch for comparisons.
        kernels: Copy and compare what is contiguous; None: PyTorch's do.
        patched: Always False: it depends on nothing that is live.
        compared_all: Always False: what is live is compared with a copy, not with what was sent.
    """

    targets: Targets
    blocks: Sequence[Block]
    memory: torch.Tensor
    mask: torch.Tensor
    kernels: Kernels | None = None
    patched = False
    compared_all = False
    _spans: Spans | None = None
    #: Parameters of the spans.
    _spanned: list[str] = field(default_factory=list)
    #: What is left: single copies.
    _copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    _comparison: Comparison | None = None
    #: The views of the live parameters that both were made of.
    _of: list[torch.Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that a commit writes."""
        return sum(block.nbytes for block in self.blocks)

    def make_views(self) -> None:
        """Make all that `write` and `verify` launch; off the pause."""
        views = self.targets.views()
        if self._of is views:
            return
        spanned, rest = self._split()
        if spanned and self.kernels is not None:
            self._spans = Spans(self.kernels, [self._sides(block) for block in spanned])
        self._spanned = [block.param for block in spanned]
        self._copies = [self._sides(block) for block in rest]
        pieces = [piece for block in rest for piece in block.pieces(limit_of(self.mask))]
        self._comparison = Comparison(self.mask, len(pieces))
        for piece in pieces:
            self._comparison.add(piece.param, *self._sides(piece))
        self._of = views

    def _split(self) -> tuple[list[Block], list[Block]]:
        """Return the blocks that are copied as spans, and the others."""
        if self.kernels is None:
            return [], list(self.blocks)
        spanned = [block for block in self.blocks if fits(*self._sides(block))]
        left = {block.at for block in spanned}
        return spanned, [block for block in self.blocks if block.at not in left]

    def _sides(self, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        return block.live(self.targets), block.staged(self.memory)

    def write(self, threads: SliceThreads) -> None:
        """Queue every copy; addresses stay as they are."""
        self.make_views()
        launches = self._spans.copies if self._spans is not None else []

        def copy(index: int) -> None:
            if index < len(launches):
                launches[index].queue()
                return
            live, staged = self._copies[index - len(launches)]
            live.copy_(staged, non_blocking=True)

        write_each(threads, copy, [1] * len(launches) + [live.nbytes for live, _ in self._copies])

    def verify(self, threads: SliceThreads) -> list[str]:
        """Return the parameters that do not hold what was staged."""
        del threads
        self.make_views()
        assert self._comparison is not None  # noqa: S101 - it has just been made
        if self._spans is not None:
            self._spans.compare()
        self._comparison.queue()
        wrong = self._comparison.wrong() if self._copies else []
        if self._spans is not None:
            wrong += [self._spanned[index] for index in self._spans.unequal()]
        return list(dict.fromkeys(wrong))


def send_blocks(
    blocks: Blocks,
    sources: Sequence[torch.Tensor],
    memory: torch.Tensor,
    uploader: Uploader,
    pace: StreamThrottle,
    stop: Callable[[], bool],
    reading: ReadProgress,
    there: Container[int] = (),
    sent: Callable[[Block], None] = lambda _: None,
) -> None:
    """Send the slices of every block to staging memory; returns when all are there.

    Args:
        blocks: Of the version.
        sources: Of its slices.
        memory: Where they go.
        uploader: Sends.
        pace: Of its stream.
        stop: Asked before every piece.
        reading: Told all the while how far the sources were read.
        there: The blocks that lie there already, by where they begin.
        sent: Called with each block whose copy was queued.

    Raises:
        StoppedError: `stop` returned True.
    """
    try:
        for block in reading.in_order(blocks.all):
            if block.at not in there:
                reading.before(block, pace)
                send_block(block, sources, memory, uploader, pace, stop)
                sent(block)
    finally:
        # Nothing may still be under way when its source is unmapped.
        pace.drain()
    reading.end()


def send_block(
    block: Block,
    sources: Sequence[torch.Tensor],
    memory: torch.Tensor,
    uploader: Uploader,
    pace: StreamThrottle,
    stop: Callable[[], bool],
) -> None:
    """Queue the slices of one block; see `send_blocks`."""
    row = block.staged(memory).reshape(-1)
    for part in block.parts:
        source = sources[part.index]
        target = row[part.begin : part.begin + source.numel()].view(source.shape)
        uploader.send_all(target, source, pace, stop)
