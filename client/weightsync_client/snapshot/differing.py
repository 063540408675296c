"""Which elements of tensors on a device differ: found there, for many tensors at a time.

A host that asks a device something waits for its turn there, and beside an engine that generates
on the same device a turn takes milliseconds. So it is asked twice for all of them: how many
elements differ, and which.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from weightsync_client.source.tensors import settle

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

__all__ = ["ChangedElements", "differing", "on_host"]

#: Elements that are compared at a time: positions take eight bytes before they are narrowed.
_PIECE = 1 << 26
#: Up to so many bytes come through pinned memory, which PyTorch keeps for the next time.
_PINNED = 256 << 20


@dataclass(frozen=True, slots=True)
class ChangedElements:
    """What differs between a tensor before and after, on its device.

    Attributes:
        index: Positions, strictly increasing: int32 where that suffices, else int64.
        before: The words there before.
        after: The words there after.
    """

    index: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor


def differing(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[ChangedElements]:
    """Return what differs in each of several tensors of one device, which is asked once.

    Args:
        pairs: Words before and after, flat, of the same dtype and length.

    Raises:
        torch.OutOfMemoryError: The device has no room for what was found.
    """
    counts = iter(_counts(pairs))
    return [_difference(old, new, counts) for old, new in pairs]


def _marks(old: torch.Tensor, new: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield, piece by piece, where it begins and which of its elements differ."""
    for at in range(0, len(old), _PIECE):
        yield at, old[at : at + _PIECE] != new[at : at + _PIECE]


def _counts(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[int]:
    """Return how many elements of each piece differ, of all tensors in a row."""
    counts = [torch.count_nonzero(marks) for pair in pairs for _, marks in _marks(*pair)]
    found: list[int] = torch.stack(counts).tolist() if counts else []
    return found


def _difference(old: torch.Tensor, new: torch.Tensor, counts: Iterator[int]) -> ChangedElements:
    narrow = torch.int32 if len(old) < 1 << 31 else torch.int64
    # A piece's count is taken for every piece, also where nothing differs.
    found = [
        (_positions(marks, count) + at).to(narrow)
        for (at, marks), count in zip(_marks(old, new), counts, strict=False)
        if count
    ]
    if not found:
        return ChangedElements(torch.empty(0, dtype=narrow, device=old.device), old[:0], new[:0])
    index = found[0] if len(found) == 1 else torch.cat(found)
    return ChangedElements(index, old.index_select(0, index), new.index_select(0, index))


def _positions(marks: torch.Tensor, count: int) -> torch.Tensor:
    """Return the positions of so many marks, without asking the device where PyTorch can do that.

    Whoever changes tensors while they are compared may get positions twice, never ones outside.
    """
    try:
        return torch.nonzero_static(marks, size=count, fill_value=0).reshape(-1)
    except NotImplementedError:
        return torch.nonzero(marks).reshape(-1)


def on_host(tensors: Sequence[torch.Tensor]) -> list[NDArray[Any]]:
    """Return flat tensors of one device on the host, by one copy for which is waited once."""
    # The widest first, so that all lie aligned.
    order = sorted(range(len(tensors)), key=lambda at: -tensors[at].element_size())
    packed = torch.cat([tensors[at].view(torch.uint8) for at in order])
    host = packed.to("cpu", non_blocking=len(packed) <= _PINNED)
    settle(packed.device)
    found, at = {}, 0
    for number in order:
        size = tensors[number].nbytes
        found[number] = host[at : at + size].view(tensors[number].dtype).numpy()
        at += size
    return [found[number] for number in range(len(tensors))]
