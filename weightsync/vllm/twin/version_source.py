"""A staged version as a checkpoint: its tensors in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.model.dtypes import torch_dtype
from weightsync.vllm.plan.load_plan import PlanRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from weightsync.model.manifest import Layout
    from weightsync.vllm.plan.model_parts import PartNames
    from weightsync.vllm.plan.read_watch import ReadWatch
    from weightsync.vllm.plan.staged_tensors import StagedTensors

__all__ = ["VersionSource"]


class VersionSource:
    """The tensors of a version.

    Args:
        layout: Of the version.
        staged: Its bytes.
        progress: Called with how many tensors were handed out.

    Raises:
        PlanRefusedError: This torch has no such dtype; named.
    """

    def __init__(
        self, layout: Layout, staged: StagedTensors, progress: Callable[[int], None]
    ) -> None:
        unknown = [t.name for t in layout.tensors if torch_dtype(t.dtype) is None]
        if unknown:
            msg = "this torch has no such dtype; push the model in another dtype"
            raise PlanRefusedError(msg, unknown)
        self.layout = layout
        self.staged = staged
        self._progress = progress

    def of_part(
        self, names: PartNames, watch: ReadWatch | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor of a part with its name, as a reader of its checkpoint does.

        Args:
            names: Of the part.
            watch: Told of each, by its name in the version.
        """
        for count, entry in enumerate(self.layout.tensors):
            name = names.own_name(entry.name)
            if name is not None:
                self._progress(count)
                tensor = self.staged.tensor(entry.name)
                if watch is not None:
                    watch.know(entry.name, tensor)
                yield name, tensor
