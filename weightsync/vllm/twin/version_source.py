"""A staged version as a checkpoint: its tensors in order, and which of them were really read."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightsync.model.dtypes import torch_dtype
from weightsync.shm.segment_socket import SegmentClient
from weightsync.shm.segments import MappedSegment
from weightsync.vllm.plan.load_plan import PlanRefusedError
from weightsync.vllm.plan.staged_tensors import StagedTensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from weightsync.model.manifest import Layout
    from weightsync.shm.staged_version import StagedVersion
    from weightsync.vllm.apply.device_ops import MemoryRegistrar
    from weightsync.vllm.plan.model_parts import PartNames

__all__ = ["ReadWatch", "VersionSource", "opened_version"]


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


@contextlib.contextmanager
def opened_version(
    socket: str, staged: StagedVersion, registrar: MemoryRegistrar | None
) -> Iterator[StagedTensors]:
    """Map the segments of a version for the body.

    Args:
        socket: The segment socket.
        staged: Where the version lies.
        registrar: Makes what is mapped known to a device; None: no device.

    Raises:
        OSError: Nobody listens on the socket.
        LookupError: The server has no such segment.
    """
    with contextlib.ExitStack() as mapped:
        views = []
        with SegmentClient(socket) as client:
            received = client.map(list(staged.segments))
        for name, (fd, size) in zip(staged.segments, received, strict=True):
            segment = MappedSegment(fd, size)
            mapped.callback(_close, segment)
            if registrar is not None:
                registrar.register(name, segment.view)
                mapped.callback(registrar.unregister, name)
            views.append(segment.view)
        yield StagedTensors(staged.manifest.layout, views)


def _close(segment: MappedSegment) -> None:
    # What a failed load still views stays mapped until its process ends, which is soon.
    with contextlib.suppress(BufferError):
        segment.close()
