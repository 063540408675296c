"""The segments that a child holds mapped.

Mapping costs 25 to 130 ms per GiB, so mappings are kept until the server tells that a segment is
gone: they keep its memory from being freed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator

#: Mappings that a child keeps; each holds a descriptor too.
MAX_MAPS = 1024


class _Entry:
    def __init__(self, fd: int, capacity: int, *, writable: bool) -> None:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.mapping = mmap.mmap(fd, capacity, flags=flags, prot=prot)
        self.view = memoryview(self.mapping)
        self.writable = writable
        self.users = 0
        self.dropped = False

    def close(self, before: Callable[[memoryview], None]) -> None:
        before(self.view)
        self.view.release()
        # A slice that a traceback still holds keeps the mapping; it goes with the last slice.
        with contextlib.suppress(BufferError):
            self.mapping.close()


class Maps:
    """Mappings by segment id, kept until forgotten or until `limit` others were used since.

    A mapping in use is unmapped by its last user. `before_unmapping` is called with what is about
    to be unmapped.
    """

    def __init__(
        self,
        limit: int = MAX_MAPS,
        before_unmapping: Callable[[memoryview], None] = lambda _: None,
    ) -> None:
        self._limit = limit
        self._before = before_unmapping
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    @contextlib.contextmanager
    def use(self, name: str, fd: int, capacity: int, *, writable: bool) -> Iterator[memoryview]:
        """Lend the view of a segment, mapping it where needed. `fd` is closed in any case."""
        try:
            entry = self._enter(name, fd, capacity, writable=writable)
        finally:
            os.close(fd)
        try:
            yield entry.view
        finally:
            self._leave(entry)

    def forget(self, name: str) -> None:
        """Unmap a segment, now or when its last user is done. Unknown ids are fine."""
        with self._lock:
            entry = self._entries.pop(name, None)
            if entry is not None:
                self._drop(entry)

    def _enter(self, name: str, fd: int, capacity: int, *, writable: bool) -> _Entry:
        with self._lock:
            entry = self._entries.get(name)
            if entry is None or (writable and not entry.writable):
                fresh = _Entry(fd, capacity, writable=writable)
                if entry is not None:
                    self._drop(entry)
                self._entries[name] = entry = fresh
            self._entries.move_to_end(name)
            entry.users += 1
            while len(self._entries) > self._limit:
                self._drop(self._entries.popitem(last=False)[1])
            return entry

    def _leave(self, entry: _Entry) -> None:
        with self._lock:
            entry.users -= 1
            if entry.dropped and not entry.users:
                entry.close(self._before)

    def _drop(self, entry: _Entry) -> None:
        entry.dropped = True
        if not entry.users:
            entry.close(self._before)
