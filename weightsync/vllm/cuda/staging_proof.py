"""Digests of tensors on a device, and whether staging memory holds what a manifest says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from weightsync.gpu.device_kernels import Digests, Kernels, digestible
from weightsync.vllm.apply.device_ops import RankPrepared, StagingProof
from weightsync.vllm.cuda.cuda_runtime import StreamPool
from weightsync.vllm.plan.int_views import StoppedError, tensor_digest_of

if TYPE_CHECKING:
    from weightsync.vllm.cuda.memory_budget import Block
    from weightsync.vllm.cuda.uploader import StreamThrottle
    from weightsync.vllm.plan.load_plan import LoadPlan


#: Small tensors that the kernel does not digest are fetched; larger ones are not proved here.
_FETCHED = 1 << 20


class Proof:
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
        """Wait for the digests of all blocks and compare them."""
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


_Key = TypeVar("_Key", int, str)
#: Tensors that are digested at a time where that is not urgent: more would leave nothing of the
#: device to others.
_AT_ONCE = 16
#: Bytes of a tensor below which its way to the host costs more than its digest.
_SMALL = 1 << 10


def digests_of(
    kernels: Kernels | None,
    tensors: Mapping[_Key, torch.Tensor],
    pace: StreamThrottle | None = None,
    stop: Callable[[], bool] = bool,
) -> dict[_Key, bytes]:
    """Return the digests of `digestible` tensors by their keys; without kernels, none.

    With `pace`, of the current stream, some are digested at a time, else all at once. Raises
    StoppedError when `stop` returns True.
    """
    if kernels is None:
        return {}
    # A kernel reads no memory of another kind than its device's.
    kind = kernels.device.type
    known = [key for key, t in tensors.items() if t.device.type == kind and digestible(t)]
    if not known:
        return {}
    # The longest first, and those beside each other that take as long.
    known.sort(key=lambda key: -tensors[key].nbytes)
    digests = Digests(kernels, [tensors[key] for key in known])
    step = _AT_ONCE if pace is not None else len(known)
    for begin in range(0, len(known), step):
        if stop():
            raise StoppedError
        digests.queue(begin, min(begin + step, len(known)))
        if pace is not None:
            pace.step()
    return dict(zip(known, digests.results(), strict=True))


def small_digests(tensors: Mapping[_Key, torch.Tensor]) -> dict[_Key, bytes]:
    """Return the digests of those of some tensors that are small; a device sends all at once."""
    found: dict[_Key, bytes] = {}
    places: defaultdict[torch.device, dict[_Key, torch.Tensor]] = defaultdict(dict)
    for key, tensor in tensors.items():
        if tensor.numel() and tensor.nbytes <= _SMALL:
            places[tensor.device][key] = tensor.contiguous().reshape(-1).view(torch.uint8)
    for small in places.values():
        sizes = [tensor.numel() for tensor in small.values()]
        parts = torch.split(torch.cat(list(small.values())).cpu(), sizes)
        found |= {key: tensor_digest_of(part) for key, part in zip(small, parts, strict=True)}
    return found
