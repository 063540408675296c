"""What differs on a CUDA device, and the digests of what does, by kernels of ours.

Each side is read twice, once to count and once to take. PyTorch's operations, which `differing`
has, read and write several times as much.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from weightsync.gpu.device_digest import Digests, digestible
from weightsync.gpu.device_kernels import Kernels, Launch
from weightsync.gpu.spans import THREADS, cut
from weightsync_client.snapshot.differing import ChangedElements

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

__all__ = ["DeviceDigests", "Pair", "Searched", "kernels_of", "search"]

#: Words before and after, flat, of one dtype and length.
Pair = tuple[torch.Tensor, torch.Tensor]

_making = threading.Lock()


def kernels_of(device: torch.device) -> Kernels | None:
    """Return the kernels for a device, compiled once, in half a second; None: it has none."""
    with _making:
        return _kernels(device)


@cache
def _kernels(device: torch.device) -> Kernels | None:
    return Kernels.find(device)


class Searched(NamedTuple):
    """What differs in tensors of one device.

    Attributes:
        differences: Of each pair, in order.
        changed: An integer on the device: other than 0 if a tensor was written meanwhile.
    """

    differences: list[ChangedElements]
    changed: torch.Tensor


def search(kernels: Kernels, pairs: Sequence[Pair]) -> Searched:
    """Return what differs; the device is asked once, how many elements do.

    Args:
        kernels: Of their device.
        pairs: Which `weightsync.gpu.spans.fits` has accepted; at least one.

    Raises:
        torch.OutOfMemoryError: The device has no room for what was found.
    """
    device = pairs[0][0].device
    rows = [cut(0, *pair) for pair in pairs]
    table = torch.from_numpy(np.concatenate(rows)).to(device)
    ends = np.cumsum([len(row) for row in rows]).tolist()
    spans = [slice(end - len(row), end) for end, row in zip(ends, rows, strict=True)]
    counts = _counted(kernels, pairs, table, spans)
    borders = [np.concatenate([[0], np.cumsum(counts[part])]) for part in spans]
    told = torch.from_numpy(np.concatenate(borders)).to(device)
    most = max(int(border[-1]) for border in borders)
    places = torch.empty(most, dtype=torch.int64, device=device)
    changed = torch.zeros(1, dtype=torch.int32, device=device)
    found = []
    for number, (pair, part, border) in enumerate(zip(pairs, spans, borders, strict=True)):
        # Of each pair one border more than spans.
        own = told[part.start + number : part.stop + number + 1]
        count = int(border[-1])
        found.append(_taken(kernels, pair, table[part], own, places[:count], changed))
    return Searched(found, changed)


def _counted(
    kernels: Kernels, pairs: Sequence[Pair], table: torch.Tensor, spans: Sequence[slice]
) -> NDArray[np.int64]:
    """Return how many elements of each span differ."""
    counts = torch.zeros(len(table), dtype=torch.int32, device=table.device)
    for (old, _), part in zip(pairs, spans, strict=True):
        _queue(kernels, "count_changes", old, table[part], counts[part])
    return counts.cpu().numpy().astype(np.int64)


def _taken(
    kernels: Kernels,
    pair: Pair,
    table: torch.Tensor,
    borders: torch.Tensor,
    places: torch.Tensor,
    changed: torch.Tensor,
) -> ChangedElements:
    """Return what differs in a pair of which it is known how much; `places` is scratch."""
    old, new = pair
    narrow = torch.int32 if len(old) < 1 << 31 else torch.int64
    after = torch.empty(len(places), dtype=new.dtype, device=new.device)
    if len(places):
        # Should fewer differ by now, the first element takes the place of the others.
        places.zero_()
        row = old.data_ptr()
        _queue(kernels, "take_changes", old, table, borders, row, places, after, changed)
    index = places.to(narrow, copy=True)
    return ChangedElements(index, old.index_select(0, index), after)


def _queue(
    kernels: Kernels, name: str, words: torch.Tensor, table: torch.Tensor, *rest: torch.Tensor | int
) -> None:
    bits = 8 * words.element_size()
    Launch(kernels, f"{name}_{bits}", (len(table), THREADS), [table, *rest]).queue()


class DeviceDigests:
    """Digests that a device computes while others work; any thread may ask for them.

    Args:
        kernels: Of the device.
        tensors: All bytes of each, in a row. They must stay as they are until a digest was given.

    Attributes:
        names: Those that it can digest.
    """

    def __init__(self, kernels: Kernels, tensors: Mapping[str, torch.Tensor]) -> None:
        known = [name for name, tensor in tensors.items() if digestible(tensor)]
        # The longest first: each is the work of one block of threads.
        known.sort(key=lambda name: -tensors[name].nbytes)
        self.names = frozenset(known)
        self._order = known
        self._lock = threading.Lock()
        self._found: dict[str, bytes] | None = None if known else {}
        if not known:
            return
        self._digests = Digests(kernels, [tensors[name] for name in known])
        self._digests.queue(0, len(known))
        device = tensors[known[0]].device
        self._done: Any = None
        if device.type == "cuda":
            # Of that device, whichever is the thread's own.
            stream = torch.cuda.current_stream(device)
            self._done = stream.record_event()

    def of(self, name: str) -> bytes:
        """Wait for the digest of a tensor of `names`, and return it."""
        with self._lock:
            if self._found is None:
                if self._done is not None:
                    # Whoever asks may have another stream.
                    self._done.synchronize()
                self._found = dict(zip(self._order, self._digests.results(), strict=True))
            return self._found[name]
