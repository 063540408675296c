"""What is made once of a load plan to stage versions on a device, and kept for the next ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.vllm.cuda.blocks import lay_out
from weightsync.vllm.cuda.staged_write import Staged
from weightsync.vllm.cuda.staging_proof import Proof

if TYPE_CHECKING:
    import torch

    from weightsync.gpu.device_kernels import Kernels
    from weightsync.vllm.plan.live_params import Targets
    from weightsync.vllm.plan.load_plan import LoadPlan

__all__ = ["StagedPlan"]


class StagedPlan:
    """The blocks of a plan, and what looks at them in staging memory, whatever is staged there.

    Args:
        plan: Of the versions.
        targets: The live destinations of its slices.
        mask: Scratch for comparisons.
        kernels: Of the device; None: PyTorch's do.
    """

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
        """Return what digests the blocks as they come; None: a rank cannot know their digests.

        None also where there are no kernels to compute them.
        """
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
        """Let go of what looks at staging memory."""
        self._staged = None
        if self._proof is not None:
            self._proof.close()
            self._proof = None
