"""A version in host memory: sent straight into the live parameters, and again to be compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightsync.vllm.apply.writes import write_each
from weightsync.vllm.cuda.bit_compare import Comparison
from weightsync.vllm.cuda.tensor_digests import digests_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from weightsync.gpu.device_kernels import Kernels
    from weightsync.vllm.apply.parallel import SliceThreads
    from weightsync.vllm.cuda.uploader import Uploader
    from weightsync.vllm.plan.live_params import Targets
    from weightsync.vllm.plan.load_plan import Slice

__all__ = ["Direct"]


@dataclass
class Direct:
    """Writes slices from mapped segments.

    Attributes:
        targets: The live destinations.
        slices: The copies of the plan.
        sources: Where each comes from.
        indices: Which of them.
        uploader: Sends them.
        mask: Scratch for comparisons.
        expected: Digest that each slice must have once it is live; None: not known.
        kernels: Compute those of live slices; None: nothing does.
        patched: Always False: it depends on nothing that is live.
        compared_all: Whether all was compared by digests. What is compared with what was sent may
            have changed since the server digested it.
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
        """Bytes that a commit writes."""
        views = self.targets.views()
        return sum(views[index].nbytes for index in self.indices)

    def write(self, threads: SliceThreads) -> None:
        """Queue every copy; addresses stay as they are."""
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
