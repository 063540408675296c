"""Commits on a device: from staging memory in a few milliseconds, or straight from the host."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

import torch

from weightsync.gpu.device_kernels import Kernels, fits
from weightsync.model.tensor_bits import wide
from weightsync.vllm.apply.parallel import SliceThreads
from weightsync.vllm.apply.writes import write_each
from weightsync.vllm.cuda.memory_budget import Block, Blocks, lay_out
from weightsync.vllm.cuda.scatter import SpanPairs
from weightsync.vllm.cuda.staging_proof import Proof, digests_of
from weightsync.vllm.cuda.uploader import ReadProgress, StreamThrottle, Uploader
from weightsync.vllm.plan.live_params import Targets
from weightsync.vllm.plan.load_plan import LoadPlan, Slice

_WIDE = torch.int64


def limit_of(mask: torch.Tensor) -> int:
    """Return how many bytes of each side are compared at a time with so much scratch."""
    return mask.numel() * _WIDE.itemsize


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two sides, their truth values and the answer, as views made before the pause.

    Making one in a pause costs as much as a launch.
    """

    left: torch.Tensor
    right: torch.Tensor
    flag: torch.Tensor
    out: torch.Tensor | None
    #: The same memory, as few wide integers.
    reduced: torch.Tensor | None

    def queue(self) -> None:
        if self.out is None or self.reduced is None:
            torch.any(self.left.ne(self.right), out=self.flag)
        else:
            torch.ne(self.left, self.right, out=self.out)
            torch.any(self.reduced, out=self.flag)


class Comparison:
    """Collects what differs, in at most `most` comparisons; the device is asked once.

    `mask` is scratch on the device, of a piece's size.
    """

    def __init__(self, mask: torch.Tensor, most: int) -> None:
        self._mask = mask
        self._flags = torch.zeros(most, dtype=torch.bool, device=mask.device)
        self._free = list(self._flags.unbind())
        self._names: list[str] = []
        self._pairs: list[_Pair] = []

    def add(self, name: str, live: torch.Tensor, wanted: torch.Tensor) -> None:
        """Have two tensors of one shape and dtype compared by `queue`."""
        self._pairs.append(self._pair(name, live, wanted))

    def queue_one(self, name: str, live: torch.Tensor, wanted: torch.Tensor) -> None:
        """Queue a comparison on the current stream; nothing of it is kept."""
        self._pair(name, live, wanted).queue()

    def _pair(self, name: str, live: torch.Tensor, wanted: torch.Tensor) -> _Pair:
        left, right = wide(live, wanted)
        out = reduced = None
        if left.dim() == 1 and left.numel() <= self._mask.numel():
            out = self._mask[: left.numel()]
            reduced = out if out.numel() % _WIDE.itemsize else out.view(_WIDE)
        flag = self._free[len(self._names)]
        self._names.append(name)
        return _Pair(left, right, flag, out, reduced)

    def queue(self) -> None:
        for pair in self._pairs:
            pair.queue()

    def wrong(self) -> list[str]:
        """Wait for everything that was queued; return the names of what differs, each once."""
        answers = self._flags[: len(self._names)].tolist()
        found = (name for name, bad in zip(self._names, answers, strict=True) if bad)
        return list(dict.fromkeys(found))


@dataclass(eq=False)
class Staged:
    """Writes blocks from staging memory; without `kernels`, PyTorch copies and compares.

    `patched` is False because it depends on nothing that is live, and `compared_all` because what
    is live is compared with a copy, not with what was sent.
    """

    targets: Targets
    blocks: Sequence[Block]
    memory: torch.Tensor
    mask: torch.Tensor
    kernels: Kernels | None = None
    patched = False
    compared_all = False
    _spans: SpanPairs | None = None
    #: Parameters of the spans.
    _spanned: list[str] = field(default_factory=list)
    #: What is left: single copies.
    _copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    _comparison: Comparison | None = None
    #: The views of the live parameters that both were made of.
    _of: list[torch.Tensor] | None = None

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    def make_views(self) -> None:
        """Make all that `write` and `verify` launch; off the pause."""
        views = self.targets.views()
        if self._of is views:
            return
        spanned, rest = self._split()
        if spanned and self.kernels is not None:
            self._spans = SpanPairs(self.kernels, [self._sides(block) for block in spanned])
        self._spanned = [block.param for block in spanned]
        self._copies = [self._sides(block) for block in rest]
        pieces = [piece for block in rest for piece in block.pieces(limit_of(self.mask))]
        self._comparison = Comparison(self.mask, len(pieces))
        for piece in pieces:
            self._comparison.add(piece.param, *self._sides(piece))
        self._of = views

    def _split(self) -> tuple[list[Block], list[Block]]:
        if self.kernels is None:
            return [], list(self.blocks)
        spanned = [block for block in self.blocks if fits(*self._sides(block))]
        left = {block.at for block in spanned}
        return spanned, [block for block in self.blocks if block.at not in left]

    def _sides(self, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        return block.live(self.targets), block.staged(self.memory)

    def write(self, threads: SliceThreads) -> None:
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

    `sources` are those of the version's slices, and `pace` is of the uploader's stream. `there` has
    the blocks that lie there already, by where they begin; `sent` is called with each block whose
    copy was queued. Raises StoppedError when `stop` returns True.
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
    row = block.staged(memory).reshape(-1)
    for part in block.parts:
        source = sources[part.index]
        target = row[part.begin : part.begin + source.numel()].view(source.shape)
        uploader.send_all(target, source, pace, stop)


class StagedPlan:
    """The blocks of a plan, and what looks at them in staging memory, whatever is staged there."""

    def __init__(
        self, plan: LoadPlan, targets: Targets, mask: torch.Tensor, kernels: Kernels | None
    ) -> None:
        pairs = zip(plan.slices, targets.views(), strict=True)
        self.targets = targets
        self.blocks = lay_out(plan.slices, {item.param: view.dtype for item, view in pairs})
        self._plan = plan
        self._mask = mask
        self._kernels = kernels
        self._staged: Staged | None = None
        self._proof: Proof | None = None

    def staged(self, memory: torch.Tensor) -> Staged:
        """Return what writes all blocks, once they are there, its views made."""
        if self._staged is None or self._staged.memory is not memory:
            # Its views are those of the version before, as long as that lay in the same place.
            blocks = self.blocks.all
            self._staged = Staged(self.targets, blocks, memory, self._mask, self._kernels)
        self._staged.make_views()
        return self._staged

    def proof(self, memory: torch.Tensor) -> Proof | None:
        """Return what digests the blocks as they come; None: no kernels or no digests known."""
        # What a rank has only a part of has no digest that it could know.
        if self._kernels is None or len(self._plan.whole) < len(self._plan.slices):
            return None
        if self._proof is None or self._proof.memory is not memory:
            if self._proof is not None:
                self._proof.close()
            self._proof = Proof(self._kernels, self.blocks.all, self._plan, memory)
        self._proof.settle()
        return self._proof

    def drop(self) -> None:
        self._staged = None
        if self._proof is not None:
            self._proof.close()
            self._proof = None


@dataclass
class Direct:
    """Writes the slices at `indices` from mapped segments.

    `expected` has the digest that each slice must have once it is live, None if it is not known.
    `kernels`, if any, compute the digests of live slices. `compared_all` says whether all was
    compared by digests: what is compared with what was sent may have changed since the server
    digested it.
    """

    targets: Targets
    slices: Sequence[Slice]
    sources: Sequence[torch.Tensor]
    indices: Sequence[int]
    uploader: Uploader
    mask: torch.Tensor
    expected: Sequence[bytes | None]
    kernels: Kernels | None
    patched = False
    compared_all = False

    @property
    def nbytes(self) -> int:
        views = self.targets.views()
        return sum(views[index].nbytes for index in self.indices)

    def write(self, threads: SliceThreads) -> None:
        views = self.targets.views()

        def send(at: int) -> None:
            index = self.indices[at]
            if self.sources[index].numel():
                self.uploader.send(views[index], self.sources[index])

        write_each(threads, send, [self.sources[index].nbytes for index in self.indices])

    def verify(self, threads: SliceThreads) -> list[str]:
        """Return the parameters that do not hold it: by digests, else everything is sent again."""
        del threads
        views = self.targets.views()
        known = {i: views[i] for i in self.indices if self.expected[i] is not None}
        found = digests_of(self.kernels, known)
        wrong = [self.slices[i].param for i, digest in found.items() if digest != self.expected[i]]
        rest = sorted(set(self.indices).difference(found))
        self.compared_all = not rest
        return list(dict.fromkeys([*wrong, *self._sent_again(rest)]))

    def _sent_again(self, indices: Sequence[int]) -> list[str]:
        views = self.targets.views()
        pieces = [
            (self.slices[index].param, live, source)
            for index in indices
            for live, source in self.uploader.pieces(views[index], self.sources[index])
        ]
        comparison = Comparison(self.mask, len(pieces))
        for param, live, source in pieces:
            # What is converted takes as much memory again: a piece of it, not all.
            comparison.queue_one(param, live, self.uploader.fetch(source).to(live.dtype))
        return comparison.wrong()
