"""The server's segments as a rank maps them, and when the rank lets go of them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from weightsync.shm.segment_socket import SegmentClient
from weightsync.shm.segments import MappedSegment
from weightsync.vllm.apply.device_ops import MemoryRegistrar
from weightsync.vllm.plan.staged_tensors import Read, StagedTensors, ViewCache

if TYPE_CHECKING:
    from weightsync.model.manifest import Layout
    from weightsync.vllm.plan.load_plan import LoadPlan


class SegmentMappings:
    """Segments of the server that this process has mapped, each once, by id."""

    def __init__(self, registrar: MemoryRegistrar | None = None) -> None:
        self._mapped: dict[str, MappedSegment] = {}
        self._registrar = registrar

    def map(self, socket: str, ids: Sequence[str]) -> list[memoryview]:
        """Return the bytes of segments, in the order of `ids`.

        Raises OSError when nobody listens on the segment socket, LookupError when one is missing.
        """
        missing = [name for name in dict.fromkeys(ids) if name not in self._mapped]
        if missing:
            with SegmentClient(socket) as client:
                received = client.map(missing)
            left = dict(zip(missing, received, strict=True))
            try:
                for name in missing:
                    self._mapped[name] = MappedSegment(*left.pop(name))
            finally:
                for fd, _ in left.values():
                    os.close(fd)
        if self._registrar is not None:
            for name in ids:
                self._registrar.register(name, self._mapped[name].view)
        return [self._mapped[name].view for name in ids]

    @property
    def ids(self) -> frozenset[str]:
        """What is mapped. Any thread may ask; what another one unmaps is in it until it has."""
        return frozenset(self._mapped)

    def unmap(self, ids: Iterable[str]) -> None:
        """Unmap these segments; one that somebody still views stays mapped."""
        for name in self.ids.intersection(ids):
            if self._registrar is not None:
                self._registrar.unregister(name)
            # Whoever views it keeps it; whoever maps it again has it registered again.
            with contextlib.suppress(BufferError):
                self._mapped[name].close()
                del self._mapped[name]

    def __len__(self) -> int:
        return len(self._mapped)


class RankSegments:
    """What a rank reads of the server's segments. None is unmapped while something reads it."""

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
        with self._lock:
            return StagedTensors(layout, self.mappings.map(socket, ids)).uniform(name)

    def read(self, socket: str, layout: Layout, ids: tuple[str, ...], plan: LoadPlan) -> Read:
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
