"""Which tensors the engine takes, so that others are refused when their layout comes."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.digest import content_head, lines_digest
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from weightsync.model.manifest import Layout, TensorEntry
    from weightsync_server.catalog.commits import CommitService
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.catalog.table import VersionTable

    #: Asks every rank; False: none can be asked. Raises ENGINE_REFUSED with names.
    Ask = Callable[[Sequence[TensorEntry]], Awaitable[bool]]

__all__ = ["AcceptedTensors"]

#: Refusals that are remembered.
_REFUSALS = 64
#: Name, dtype and shape.
_Kind = tuple[str, str, tuple[int, ...]]


def _kinds(tensors: Sequence[TensorEntry]) -> set[_Kind]:
    return {(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors}


def _names(kinds: tuple[_Kind, ...]) -> frozenset[str]:
    return frozenset(name for name, _, _ in kinds)


class AcceptedTensors:
    """Names, dtypes and shapes that the engine takes, as far as anybody asked it.

    Args:
        table: The versions of the model.
        commits: Has their manifests.

    Attributes:
        asks: Ask the engines, by name, for those that are not known.
    """

    def __init__(self, table: VersionTable, commits: CommitService) -> None:
        self.asks: dict[str, Ask] = {}
        self._table = table
        self._commits = commits
        self._kinds: set[_Kind] = set()
        self._signatures: set[str] = set()
        # What was said of them, by the digest of the tensors that were asked about.
        self._refused: OrderedDict[str, tuple[str, dict[str, str]]] = OrderedDict()

    async def learn(self, record: VersionRecord) -> None:
        """Take note that every rank of the engine takes a version's tensors."""
        layout = (await self._commits.manifest(record)).layout
        await self._learn(layout)
        for other in self._table.list():
            same = other.commit is not None and other.commit.layout_digest == layout.digest
            if (same or other is record) and other.layout_check != pb.LAYOUT_CHECK_PASSED:
                other.layout_check = pb.LAYOUT_CHECK_PASSED
                self._table.publish(other)

    async def _learn(self, layout: Layout) -> None:
        signature: str = await asyncio.to_thread(getattr, layout, "signature")
        if signature not in self._signatures:
            kinds = await asyncio.to_thread(_kinds, layout.tensors)
            # Not before: the engine may have been forgotten meanwhile.
            self._signatures.add(signature)
            self._kinds |= kinds

    async def names(self) -> frozenset[str]:
        """Return the names that the engine is known to take, its own checkpoint's among them."""
        # A copy: what is learned meanwhile would change the set under the thread.
        return await asyncio.to_thread(_names, tuple(self._kinds))

    def forget(self) -> None:
        """Take note that the engine may be another one."""
        self._kinds, self._signatures = set(), set()
        self._refused.clear()

    async def check(self, tensors: Sequence[TensorEntry]) -> bool:
        """Return whether the engine takes these tensors of a version; False: nobody knows.

        Raises:
            WeightSyncError: ENGINE_REFUSED, naming those that it does not take.
        """
        if not self._kinds or not self.asks:
            return False
        kinds, others = await asyncio.to_thread(self._others, tensors)
        if not others:
            return True
        heads = await asyncio.to_thread(_heads, others)
        if heads in self._refused:
            message, facts = self._refused[heads]
            raise WeightSyncError(Reason.ENGINE_REFUSED, message, metadata=facts)
        known = self._kinds
        try:
            # Every engine is asked, also after one that could not be.
            taken = all([await ask(others) for ask in tuple(self.asks.values())])
        except WeightSyncError as error:
            if error.reason is Reason.ENGINE_REFUSED:
                self._remember(heads, error)
            raise
        # Another engine may have come meanwhile, of which nothing is known.
        if taken and self._kinds is known:
            known |= kinds
        return taken

    def _others(self, tensors: Sequence[TensorEntry]) -> tuple[set[_Kind], list[TensorEntry]]:
        kinds = _kinds(tensors) - self._kinds
        others = [t for t in tensors if (t.name, t.dtype, t.shape) in kinds]
        return kinds, others

    def _remember(self, heads: str, error: WeightSyncError) -> None:
        self._refused[heads] = error.message, error.metadata
        while len(self._refused) > _REFUSALS:
            self._refused.popitem(last=False)


def _heads(tensors: Sequence[TensorEntry]) -> str:
    return lines_digest(sorted(content_head(t.name, t.dtype, t.shape) for t in tensors))
