"""Whether staging memory holds what a version's manifest tells, found out on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.gpu.device_digest import Digests, digestible
from weightsync.vllm.apply.device_ops import StagingProof
from weightsync.vllm.cuda.stream_pool import StreamPool
from weightsync.vllm.plan.int_views import tensor_digest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from weightsync.gpu.device_kernels import Kernels
    from weightsync.vllm.apply.prepared import RankPrepared
    from weightsync.vllm.cuda.blocks import Block
    from weightsync.vllm.plan.load_plan import LoadPlan

__all__ = ["Proof"]

#: Small tensors that the kernel does not digest are fetched; larger ones are not proved here.
_FETCHED = 1 << 20


class Proof:
    """Digests blocks of a plan as they come into staging memory.

    Args:
        kernels: Of the device.
        blocks: Of the plan.
        plan: It.
        memory: Staging memory.
    """

    def __init__(
        self,
        kernels: Kernels,
        blocks: Sequence[Block],
        plan: LoadPlan,
        memory: torch.Tensor,
    ) -> None:
        self.memory = memory
        self._plan = plan
        self._whole: dict[int, torch.Tensor] = {}
        #: Slices that the kernel digests, in the order of its table, and which of a block.
        self._order: list[int] = []
        self._rows: dict[int, tuple[int, int]] = {}
        for block in blocks:
            begin = len(self._order)
            row = block.staged(memory).reshape(-1)
            for part in block.parts:
                item = plan.slices[part.index]
                if part.index not in plan.whole:
                    continue
                tensor = row[part.begin : part.begin + item.target.numel]
                self._whole[part.index] = tensor
                if digestible(tensor):
                    self._order.append(part.index)
            self._rows[block.at] = begin, len(self._order)
        tensors = [self._whole[index] for index in self._order]
        self._digests = Digests(kernels, tensors) if tensors else None
        self._streams = StreamPool(memory.device)

    def close(self) -> None:
        """Wait for all digests that were begun, before its memory is given back."""
        self._streams.close()

    def settle(self) -> None:
        """Have the current stream wait for all digests that were begun."""
        self._streams.settle()

    def covers(self, block: Block) -> bool:
        """Tell whether the digests prove all of a block, and no other proof is needed."""
        begin, end = self._rows[block.at]
        digested = set(self._order[begin:end])
        return all(
            part.index in digested
            or (part.index in self._whole and self._whole[part.index].nbytes <= _FETCHED)
            for part in block.parts
        )

    def begin(self, block: Block) -> None:
        """Digest a block as soon as it is there: what the current stream was given before."""
        begin, end = self._rows[block.at]
        if self._digests is None or begin == end:
            return
        with self._streams.use():
            self._digests.queue(begin, end)

    def end(self, target: RankPrepared, stop: Callable[[], bool]) -> StagingProof:
        """Wait for the digests of all blocks, which were begun, and compare them.

        Raises:
            StoppedError: `stop` returned True.
        """
        found: dict[int, bytes] = {}
        if self._digests is not None:
            self.settle()
            found = dict(zip(self._order, self._digests.results(), strict=True))
        for index, tensor in self._whole.items():
            if index not in found and tensor.nbytes <= _FETCHED:
                found[index] = tensor_digest_of(tensor, stop=stop)
        names = {index: item.tensor for index, item in enumerate(self._plan.slices)}
        unlike = {names[i] for i, digest in found.items() if digest != target.digests[names[i]]}
        open_ = {name for index, name in names.items() if index not in found}
        return StagingProof(frozenset(names.values()) - open_ - unlike, tuple(sorted(unlike)))
