"""What the engines of a model hold, so that trainers cast to it and lack none of it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from weightsync.model.manifest import Layout, TensorEntry
    from weightsync_server.catalog.record import VersionRecord


#: Bytes of a page, counted generously: well below the 1 MiB that the contract allows a message.
_PAGE_BYTES = 512 << 10
#: Sets of names that are remembered.
_SPARE = 16
#: Digits of a position.
_DIGITS = 9
#: Of a tensor beside its name and its dimensions.
_TENSOR_BYTES, _DIM_BYTES = 32, 10


class _Engine(Protocol):
    @property
    def proved(self) -> VersionRecord | None:
        """What every rank is proved to hold; None: that is not known."""

    async def takes(self, tensors: Sequence[TensorEntry], *, whole: bool = False) -> bool:
        """Ask every rank whether it takes tensors of a push; False: none can be asked now."""


class LayoutPage(NamedTuple):
    """Some of the tensors that all engines hold, sorted by name.

    `signature` is that of all of them, or "" if not known. An empty `next_token` marks the last
    page.
    """

    signature: str
    tensors: Sequence[TensorEntry] = ()
    next_token: str = ""


class EngineLayouts:
    """What engines are proved to hold; `engines` has each one only while it is there."""

    def __init__(self) -> None:
        self.engines: WeakValueDictionary[str, _Engine] = WeakValueDictionary()
        #: What may be absent: the engine, what it holds, and the names.
        self._spare: OrderedDict[tuple[str, str, frozenset[str]], None] = OrderedDict()

    async def current(self) -> Layout | None:
        """Return what every engine that is proved holds; None: none is, or they hold different."""
        proved = [engine.proved for engine in list(self.engines.values())]
        manifests = [record.manifest for record in proved if record is not None]
        layouts = {id(m.layout): m.layout for m in manifests if m is not None}
        found: dict[str, Layout] = {}
        for layout in layouts.values():
            # It is sorted and digested once, off the event loop.
            found[await asyncio.to_thread(getattr, layout, "signature")] = layout
        return found.popitem()[1] if len(found) == 1 else None

    async def check_whole(
        self, tensors: Sequence[TensorEntry], known: Layout | None = None
    ) -> None:
        """Refuse a version that lacks tensors which an engine needs, unless that engine is away.

        `known` is the layout of `tensors`, if other versions have it as well.
        """
        for name, engine in list(self.engines.items()):
            record = engine.proved
            if record is None or record.manifest is None or record.manifest.layout is known:
                continue
            layout = record.manifest.layout
            absent = await asyncio.to_thread(_absent, layout.tensors, tensors)
            spare = name, await asyncio.to_thread(getattr, layout, "signature"), absent
            # It holds more than it needs, such as a head that is tied: its ranks know.
            if absent and spare not in self._spare and await engine.takes(tensors, whole=True):
                self._spare[spare] = None
                while len(self._spare) > _SPARE:
                    self._spare.popitem(last=False)

    async def page(self, known: str, token: str) -> LayoutPage:
        """Return a page of `current`, without tensors if `known` is its signature.

        An empty `token`, or one of another layout than is held now, gets the first page.
        """
        layout = await self.current()
        if layout is None:
            return LayoutPage("")
        signature = layout.signature
        if known == signature:
            return LayoutPage(signature)
        of, _, position = token.partition(".")
        ours = of == signature and position.isascii() and position.isdecimal()
        first = int(position) if ours and len(position) <= _DIGITS else 0
        # In an order that the signature fixes: the next page may come of another layout with it.
        tensors = _page(layout, first)
        end = first + len(tensors)
        more = f"{signature}.{end}" if end < len(layout.tensors) else ""
        return LayoutPage(signature, tensors, more)


def _absent(needed: Sequence[TensorEntry], tensors: Sequence[TensorEntry]) -> frozenset[str]:
    return frozenset(tensor.name for tensor in needed).difference(t.name for t in tensors)


def _page(layout: Layout, first: int) -> list[TensorEntry]:
    size = 0
    page: list[TensorEntry] = []
    for at in layout.by_name[first:]:
        if size >= _PAGE_BYTES:
            break
        tensor = layout.tensors[at]
        # A character takes up to 4 bytes.
        size += 4 * len(tensor.name) + _TENSOR_BYTES + _DIM_BYTES * len(tensor.shape)
        page.append(tensor)
    return page
