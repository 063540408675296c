"""Which tensors the engine takes: others are refused with their layout and the nearest name."""

from __future__ import annotations

import asyncio
import difflib
import heapq
import json
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.digest import content_head, lines_digest
from weightsync.model.manifest import Layout, TensorEntry
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from weightsync_server.catalog.commits import CommitService
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.catalog.table import VersionTable

    #: Asks every rank; False: none can be asked. Raises ENGINE_REFUSED with names.
    Ask = Callable[[Sequence[TensorEntry]], Awaitable[bool]]


#: Refusals that are remembered.
_REFUSALS = 64
#: Name, dtype and shape.
_Kind = tuple[str, str, tuple[int, ...]]


def _kinds(tensors: Sequence[TensorEntry]) -> set[_Kind]:
    return {(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors}


def _names(kinds: tuple[_Kind, ...]) -> frozenset[str]:
    return frozenset(name for name, _, _ in kinds)


class LayoutCompatibility:
    """Names, dtypes and shapes that the engine takes; `asks` ask for those not known."""

    def __init__(self, table: VersionTable, commits: CommitService) -> None:
        self.asks: dict[str, Ask] = {}
        self._table = table
        self._commits = commits
        self._kinds: set[_Kind] = set()
        self._signatures: set[str] = set()
        # What was said of them, by the digest of the tensors that were asked about.
        self._refused: OrderedDict[str, tuple[str, dict[str, str]]] = OrderedDict()

    async def learn(self, record: VersionRecord) -> None:
        layout = (await self._commits.manifest(record)).layout
        await self._learn(layout)
        for other in self._table.list():
            same = other.commit is not None and other.commit.layout_digest == layout.digest
            if (same or other is record) and other.layout_check != pb.LAYOUT_CHECK_PASSED:
                other.check_layout(pb.LAYOUT_CHECK_PASSED)
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
        self._kinds, self._signatures = set(), set()
        self._refused.clear()

    async def check(self, tensors: Sequence[TensorEntry]) -> bool:
        """Return whether the engine takes these tensors of a version; False: nobody knows."""
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


#: Characters of names that are compared: it takes the square of them, and a status is short.
_MAX_CHARS = 200
#: Names that are compared letter by letter, which takes far longer than to compare their parts.
_COMPARED = 64
#: Prefixes that are tried: where the first name fits more, none of them is what was meant.
_PREFIXES = 8
_PART = re.compile(r"[^._]+")
#: Of values and rewards, which trainers put upon a model and no engine generates with.
_HEAD = re.compile(r"(?:^|\.)(?:v_head|value_head|reward_head|critic_head|score)\.")


async def add_suggestion(
    error: WeightSyncError, tensors: Sequence[TensorEntry], accepted: LayoutCompatibility
) -> WeightSyncError:
    """Return a refusal that also tells what was probably meant; reason and metadata stay."""
    if error.reason is not Reason.ENGINE_REFUSED:
        return error
    refused: list[str] = json.loads(error.metadata.get("tensors", "[]"))
    known = await accepted.names()
    # In a thread: with tens of thousands of names it takes longer than streams may stand still.
    remedy, hint = await asyncio.to_thread(_suggestion, refused, tensors, known)
    return WeightSyncError(
        error.reason,
        (f"{remedy}: " if remedy else "") + error.message + hint,
        metadata=error.metadata,
        retry_after_s=error.retry_after_s,
    )


def _suggestion(
    refused: Sequence[str], tensors: Sequence[TensorEntry], known: AbstractSet[str]
) -> tuple[str, str]:
    """Return what to do, before a refusal, and what is like it, after; each may be empty."""
    unknown = [tensor.name for tensor in tensors if tensor.name not in known]
    # What is refused may be a shape or dtype, or be named after parameters.
    asked = frozenset(refused).intersection(unknown)
    if not asked or not known:
        return "", ""
    heads = [name for name in unknown if _HEAD.search(name)]
    others = [name for name in unknown if not _HEAD.search(name)]
    remedies = [prefix_remedy(others, known), _leave_out(heads)]
    first = next((name for name in refused if name in asked and name in others), None)
    hint = ""
    if first is not None and not remedies[0] and len(first) <= _MAX_CHARS:
        nearest = nearest_name(first, known)
        hint = f"; the nearest name to '{first}' that the engine knows is '{nearest}'"
        hint = hint if nearest else ""
    return " and ".join(filter(None, remedies)), hint


def _leave_out(heads: Sequence[str]) -> str:
    """Return what becomes of heads that the engine's model has not; "": there are none."""
    if not heads:
        return ""
    shown = heads[0] if len(heads[0]) <= _MAX_CHARS else heads[0][: _MAX_CHARS - 3] + "..."
    more = f" and {len(heads) - 1} more" if len(heads) > 1 else ""
    return f"leave out '{shown}'{more}, of a head that the engine's model has not"


def prefix_remedy(unknown: Sequence[str], known: AbstractSet[str]) -> str:
    """Return how one prefix makes all unknown names known; "": none does, or several do."""
    if not unknown:
        return ""
    for prefix in _leading(unknown[0]):
        if all(n.startswith(prefix) and n[len(prefix) :] in known for n in unknown):
            return f"remove the prefix '{prefix}' from the names"
    end = f".{unknown[0]}"
    longer = (name for name in known if name.endswith(end) and len(name) <= _MAX_CHARS)
    prefixes = [name[: 1 - len(end)] for name in islice(longer, _PREFIXES + 1)]
    if len(prefixes) > _PREFIXES:
        return ""
    fits = [prefix for prefix in prefixes if all(prefix + name in known for name in unknown)]
    return f"add the prefix '{fits[0]}' to the names" if len(fits) == 1 else ""


def _leading(name: str) -> Iterator[str]:
    """Yield what of a name can be a prefix: whole parts, the shortest one first."""
    return (name[: dot.end()] for dot in islice(re.finditer(r"\.", name), _PREFIXES))


def nearest_name(name: str, known: Collection[str]) -> str:
    """Return the known name that is most like another one; "": none is like it.

    Common parts count before letters, which alone would prefer a short name of another layer.
    """
    parts = frozenset(_PART.findall(name))

    def common(other: str) -> int:
        return len(parts.intersection(_PART.findall(other)))

    def likeness(other: str) -> tuple[int, int, str]:
        return common(other), -abs(len(other) - len(name)), other

    short = (other for other in known if len(other) <= _MAX_CHARS)
    compared = heapq.nlargest(_COMPARED, short, key=likeness)
    best = [other for other in compared if common(other) == common(compared[0])]
    return next(iter(difflib.get_close_matches(name, best, n=1)), "")
