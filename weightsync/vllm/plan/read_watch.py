"""What the loading of a model read of its checkpoint, which memory it wrote, and which numbers.

A tensor that only was handed out was not read. What was read has become something, also where it is
the same as what was there before.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

#: Methods of a tensor that hand its values to Python; dispatch shows the first one only.
_VALUES = ("item", "tolist", "numpy", "__float__", "__array__", "__dlpack__")


class StorageSet:
    """Storages, as long as they are there: another one may take the place of one that is gone."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self._found: dict[int, StorageWeakRef] = {}
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = int(storage._cdata)  # noqa: SLF001 - as torch's own weak references know it
        known = self._found.get(key)
        if known is None or known.expired():  # type: ignore[no-untyped-call]
            self._found[key] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def __contains__(self, tensor: torch.Tensor) -> bool:
        key = int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - as above
        known = self._found.get(key)
        return known is not None and not known.expired()  # type: ignore[no-untyped-call]


@dataclass
class _Source:
    """The tensors of a checkpoint that lie in one storage: address, bytes and name, in order."""

    storage: StorageWeakRef
    places: list[tuple[int, int, str]] = field(default_factory=list)

    def add(self, begin: int, size: int, name: str) -> None:
        """Add a tensor, in the place of those that lay there: readers use their buffers again."""
        first = bisect_right(self.places, begin, key=lambda place: place[0])
        if first and begin < sum(self.places[first - 1][:2]):
            first -= 1
        last = bisect_left(self.places, begin + size, key=lambda place: place[0])
        self.places[first:last] = [(begin, size, name)]

    def name_at(self, address: int) -> str | None:
        index = bisect_right(self.places, address, key=lambda place: place[0]) - 1
        if index < 0:
            return None
        begin, size, name = self.places[index]
        return name if address < begin + size else None


class ReadWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read: set[str] = set()
        self.written = StorageSet()
        self._sources: dict[int, _Source] = {}

    def hand_out(
        self, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            self.know(name, tensor)
            yield name, tensor

    def know(self, name: str, tensor: torch.Tensor) -> None:
        if not tensor.numel():
            # There is nothing to read.
            self.read.add(name)
        if not _has_memory(tensor):
            return
        storage = tensor.untyped_storage()
        key = int(storage._cdata)  # noqa: SLF001 - as torch's own weak references know it
        source = self._sources.get(key)
        if source is None or source.storage.expired():  # type: ignore[no-untyped-call]
            source = _Source(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
            self._sources[key] = source
        source.add(tensor.data_ptr(), tensor.nbytes, name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        # What only makes a view of a tensor reads nothing of it.
        if not _makes_views(func):
            for value in _flat(args):
                self.note(value)
            for value in written_by(func, args, kwargs or {}):
                if _has_memory(value):
                    self.written.add(value)
        return func(*args, **(kwargs or {}))

    def note(self, value: object) -> None:
        if not isinstance(value, torch.Tensor) or not _has_memory(value) or not value.numel():
            return
        source = self._sources.get(int(value.untyped_storage()._cdata))  # noqa: SLF001 - as above
        if source is None or source.storage.expired():  # type: ignore[no-untyped-call]
            return
        name = source.name_at(value.data_ptr())
        if name is not None:
            self.read.add(name)


@contextlib.contextmanager
def values_read(note: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call `note` with every tensor whose values Python is told meanwhile, in any thread.

    What it reads itself is left out.
    """
    # As they are now: a loader watches the load of a model that is watched by itself. Most of them
    # torch's class inherits.
    before = {name: vars(torch.Tensor).get(name) for name in _VALUES}
    for name in _VALUES:
        setattr(torch.Tensor, name, _noting(getattr(torch.Tensor, name), note))
    try:
        yield
    finally:
        for name, method in before.items():
            if method is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, method)


def _noting(method: Any, note: Callable[[torch.Tensor], None]) -> Any:
    @functools.wraps(method)
    def noted(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not getattr(_noted, "now", False):
            _noted.now = True
            try:
                note(self)
            finally:
                _noted.now = False
        return method(self, *args, **kwargs)

    return noted


_noted = threading.local()


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    for index, name in _written_places(func):
        value = args[index] if index < len(args) else kwargs.get(name)
        found += value if isinstance(value, list | tuple) else [value]
    return found


@functools.cache
def _written_places(func: Any) -> tuple[tuple[int, str], ...]:
    # Schemas are slow to read: a model of experts is loaded by a hundred thousand operations.
    schema = func._schema  # noqa: SLF001 - torch has no other word for what an operation writes
    if not schema.is_mutable:
        return ()
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@functools.cache
def _makes_views(func: Any) -> bool:
    return bool(func.is_view)


def _flat(args: tuple[Any, ...]) -> Iterator[object]:
    for value in args:
        yield from value if isinstance(value, list | tuple) else (value,)


def _has_memory(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_meta:
        return False
    try:
        return bool(value.data_ptr())
    except RuntimeError:
        # What a compiler traces with has none.
        return False
