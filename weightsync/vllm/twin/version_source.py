"""A staged version as a checkpoint: its tensors in order, and which of them were really read."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightsync.model.dtypes import torch_dtype
from weightsync.vllm.plan.load_plan import PlanRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from weightsync.model.manifest import Layout
    from weightsync.vllm.plan.model_parts import PartNames
    from weightsync.vllm.plan.staged_tensors import StagedTensors

__all__ = ["ReadWatch", "VersionSource"]


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

    def of_part(self, names: PartNames) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor of a part with its name, as a reader of its checkpoint does."""
        for count, entry in enumerate(self.layout.tensors):
            name = names.own_name(entry.name)
            if name is not None:
                self._progress(count)
                yield name, self.staged.tensor(entry.name)


class ReadWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which tensors of a version an operation read: one that only was handed out was not.

    Args:
        source: The version. Its tensors must not be copied before they are handed out.

    Attributes:
        read: Their names.
    """

    def __init__(self, source: VersionSource) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        places = []
        for entry in source.layout.tensors:
            tensor = source.staged.tensor(entry.name)
            places.append((tensor.data_ptr(), tensor.nbytes, entry.name))
        places.sort()
        self.read: set[str] = {name for _, size, name in places if not size}
        self._begins = [begin for begin, _, _ in places]
        self._places = places

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note what an operation reads, and do it."""
        del types
        # What only makes a view of a tensor reads nothing of it.
        if not func.is_view:
            for value in args:
                for tensor in value if isinstance(value, list | tuple) else (value,):
                    self._note(tensor)
        return func(*args, **(kwargs or {}))

    def _note(self, value: object) -> None:
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return
        if value.layout is not torch.strided or not value.numel():
            return
        index = bisect_right(self._begins, value.data_ptr()) - 1
        if index >= 0:
            begin, size, name = self._places[index]
            if value.data_ptr() < begin + size:
                self.read.add(name)
