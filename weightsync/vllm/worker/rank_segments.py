"""What a rank reads of the server's segments, and when it lets go of them."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from weightsync.vllm.apply.segment_mappings import SegmentMappings
from weightsync.vllm.plan.staged_tensors import StagedTensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from weightsync.model.manifest import Layout
    from weightsync.vllm.apply.device_ops import MemoryRegistrar
    from weightsync.vllm.plan.load_plan import LoadPlan
    from weightsync.vllm.plan.view_cache import Read, ViewCache

__all__ = ["RankSegments"]


class RankSegments:
    """What a rank reads of the server's segments. None is unmapped while something reads it.

    Args:
        views: Of segments and live parameters.
        registrar: Makes mapped segments known to a device; None: no device.
        in_use: Returns the ids of segments that prepared versions read.

    Attributes:
        mappings: The segments.
    """

    def __init__(
        self,
        views: ViewCache,
        registrar: MemoryRegistrar | None,
        in_use: Callable[[], Iterable[str]],
    ) -> None:
        self._views = views
        self.mappings = SegmentMappings(registrar)
        self._slow = registrar is not None
        self._in_use = in_use
        self._lock = threading.Lock()
        self._unmapping: threading.Thread | None = None
        #: Segments that are read ahead, which may be gone for the server at any time.
        self._incoming: tuple[str, ...] = ()

    def tensors(self, socket: str, layout: Layout, ids: Sequence[str]) -> StagedTensors:
        """Return the tensors of a version; no call that unmaps segments may come meanwhile."""
        with self._lock:
            return StagedTensors(layout, self.mappings.map(socket, ids))

    def uniform(self, socket: str, layout: Layout, ids: Sequence[str], name: str) -> bool:
        """Tell whether a tensor of a version holds one value all over, bit for bit."""
        with self._lock:
            return StagedTensors(layout, self.mappings.map(socket, ids)).uniform(name)

    def read(self, socket: str, layout: Layout, ids: tuple[str, ...], plan: LoadPlan) -> Read:
        """Return what a plan reads of a version; see `ViewCache.read`."""
        with self._lock:
            return self._views.read(layout, ids, plan, self.mappings.map(socket, ids))

    @contextlib.contextmanager
    def incoming(
        self, socket: str, layout: Layout, ids: tuple[str, ...], plan: LoadPlan
    ) -> Iterator[Read]:
        """Return what a plan reads of a version that still comes in, which stays for the body."""
        try:
            with self._lock:
                self._incoming = ids
            yield self.read(socket, layout, ids, plan)
        finally:
            self._incoming = ()

    def unmap(self, gone: frozenset[str]) -> None:
        """Unmap segments that nothing reads, on a device after this returns."""
        if not self._slow:
            self._unmap(gone)
        elif gone and (self._unmapping is None or not self._unmapping.is_alive()):
            # Taking gigabytes from a device lasts longer than a step.
            self._unmapping = threading.Thread(
                target=self._unmap, args=(gone,), name="weightsync", daemon=True
            )
            self._unmapping.start()

    def _unmap(self, gone: frozenset[str]) -> None:
        # A prepare that begins meanwhile maps none of these, for they do not exist any more.
        with self._lock:
            gone = gone.difference(self._incoming, self._in_use())
            self._views.forget(gone)
            self.mappings.unmap(gone)
