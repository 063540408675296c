"""What a fetcher does for deltas: lay a base, prove delta shards, change shards as they tell."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from weightsync import failpoints
from weightsync.delta import apply_change, parse_shard, warm_up
from weightsync.model.manifest import Manifest
from weightsync_server.ops.os_errors import read_fault
from weightsync_server.workers.fetch.delta_summary import (
    CODINGS,
    DeltaHeader,
    TensorDelta,
    pack_changes,
)
from weightsync_server.workers.fetch.shard_tasks import PIECE, check_length, look, read_pieces

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from weightsync.delta import TensorChange
    from weightsync.model.manifest import Layout, ShardEntry

__all__ = ["Canonical", "canonical", "copy", "inspect", "patch", "read", "warm"]

#: Layouts that are kept: a run has one.
_KEPT = 2
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Canonical:
    """A layout as deltas need it.

    Attributes:
        layout: The layout.
        kinds: Dtype and shape of each tensor by name.
        places: Place of each tensor in the layout by name.
    """

    layout: Layout
    kinds: Mapping[str, tuple[str, tuple[int, ...]]]
    places: Mapping[str, int]


_known: OrderedDict[str, Canonical] = OrderedDict()
_lock = threading.Lock()


@cache
def warm() -> None:
    """Begin to load the codec's kernels, beside what must be done before they are needed."""
    threading.Thread(target=warm_up, name="kernels", daemon=True).start()


def canonical(name: str, view: memoryview) -> Canonical:
    """Return the layout in a segment, read once per segment: what lies there never changes.

    Args:
        name: Id of the segment.
        view: Its bytes: the length of a manifest in 8 bytes, then the manifest.
    """
    with _lock:
        found = _known.get(name)
        if found is None:
            size = int.from_bytes(view[:_LENGTH_BYTES], "little")
            layout = Manifest.from_json(view[_LENGTH_BYTES : _LENGTH_BYTES + size]).layout
            kinds = {t.name: (t.dtype, t.shape) for t in layout.tensors}
            places = {t.name: at for at, t in enumerate(layout.tensors)}
            found = _known[name] = Canonical(layout, kinds, places)
            while len(_known) > _KEPT:
                _known.popitem(last=False)
        return found


def read(fd: int, shard: ShardEntry, stop: threading.Event) -> memoryview:
    """Return the bytes of a stored delta shard.

    Raises:
        WeightSyncError: DATA_CORRUPT when the file has another length or cannot be read.
        Cancelled: The server no longer wants it.
    """
    try:
        check_length(fd, shard.size, "delta")
        view = memoryview(bytearray(shard.size))
        read_pieces(fd, view, "delta", stop)
    except OSError as error:
        raise read_fault(error, "reading a stored delta") from error
    return view


def copy(source: memoryview, view: memoryview, stop: threading.Event) -> None:
    """Fill `view` with as many bytes of `source`.

    Raises:
        Cancelled: The server no longer wants it.
    """
    failpoints.hit("fetcher.copy")
    ours, theirs = _array(view), _array(source)
    for at in range(0, len(ours), PIECE):
        look(stop)
        piece = ours[at : at + PIECE]
        # Releases the GIL, as a copy between views does not.
        np.copyto(piece, theirs[at : at + len(piece)])


def inspect(known: Canonical, source: memoryview, stop: threading.Event) -> bytes:
    """Check every byte of a delta shard and return what it changes, as `pack_changes` does.

    Raises:
        WeightSyncError: SHARD_INVALID, DIGEST_MISMATCH, LAYOUT_INVALID.
        Cancelled: The server no longer wants it.
    """
    failpoints.hit("fetcher.inspect")
    delta = parse_shard(source, known.kinds)
    look(stop)
    header = DeltaHeader(delta.index, delta.base_content_digest, delta.layout_digest)
    return pack_changes(header, (_change(known, change) for change in delta.changes.values()))


def patch(
    view: memoryview, index: int, known: Canonical, source: memoryview, stop: threading.Event
) -> None:
    """Change the tensors of the canonical shard `index`, which lies in `view`.

    Raises:
        WeightSyncError: As `inspect`; tensors before the bad one are changed.
        Cancelled: The server no longer wants it.
    """
    delta = parse_shard(source, known.kinds)
    start = known.layout.shards[index].data_start
    failpoints.hit("delta.patch")
    data = _array(view)
    for name, change in delta.changes.items():
        tensor = known.layout.tensors[known.places[name]]
        if tensor.shard == index:
            look(stop)
            apply_change(change, data[start + tensor.begin : start + tensor.end])


def _array(view: memoryview) -> NDArray[np.uint8]:
    # Of a slice of its own: an array that a traceback still holds must not keep the view.
    return np.frombuffer(view[:], np.uint8)


def _change(known: Canonical, change: TensorChange) -> TensorDelta:
    coding = str(change.record.coding).partition("+")[0]
    return TensorDelta(known.places[change.name], change.nnz, CODINGS.index(coding), change.digest)
