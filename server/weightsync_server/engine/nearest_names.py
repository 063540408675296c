"""A refusal of names that the engine does not know tells what the trainer probably meant.

Either one prefix that all of them have too much or too little, which comes first, or else, for the
first of them, the nearest name that the engine knows. Heads that trainers add for themselves are to
be left out, whatever is meant by the others. Reason and metadata of the refusal stay as they are.
"""

from __future__ import annotations

import asyncio
import difflib
import heapq
import json
import re
from itertools import islice
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from weightsync.model.manifest import TensorEntry
    from weightsync_server.catalog.accepted_tensors import AcceptedTensors

__all__ = ["add_suggestion", "nearest_name", "prefix_remedy"]

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
    error: WeightSyncError, tensors: Sequence[TensorEntry], accepted: AcceptedTensors
) -> WeightSyncError:
    """Return a refusal that also tells what was probably meant, or the same one.

    Args:
        error: What was refused; only names that the engine does not know make a suggestion.
        tensors: What the engine was asked about.
        accepted: Has the names that it takes.
    """
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
    """Return how one prefix makes all unknown names known; "": none does, or several do.

    Args:
        unknown: Names that the engine does not know.
        known: Names that it takes.
    """
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

    Of those that have most parts in common with it, the one with the most letters in common:
    letters alone would prefer a short name of another layer.

    Args:
        name: The other one.
        known: Names to choose from; the same ones give the same answer in whatever order.
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
