"""What a fetcher does for deltas: lay a base, prove delta shards, change shards and slices."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from weightsync import failpoints
from weightsync.delta import (
    DenseDelta,
    DenseTensor,
    TensorChange,
    apply_change,
    parse_shard,
    warm_up,
)
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.manifest import Layout, Manifest, ShardEntry
from weightsync.model.tensor_slices import SliceSpan
from weightsync.wire.child_channel import read_note
from weightsync_server.ops.os_errors import read_fault
from weightsync_server.workers.fetch.fetch_api import (
    CODINGS,
    DeltaHeader,
    TensorDelta,
    pack_changes,
)
from weightsync_server.workers.fetch.shard_tasks import PIECE, look, read_whole

if TYPE_CHECKING:
    from numpy.typing import NDArray


#: Layouts that are kept: a run has one.
_KEPT = 2
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Canonical:
    """A layout as deltas need it: `kinds` has dtype and shape by name, `places` the place in it."""

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
    """Return the layout in a segment, read once per segment id `name`: it never changes.

    `view` has a manifest's length in 8 bytes, then the manifest.
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
    try:
        view = memoryview(bytearray(shard.size))
        read_whole(fd, view, "delta", stop)
    except OSError as error:
        raise read_fault(error, "reading a stored delta") from error
    return view


def copy(source: memoryview, view: memoryview, stop: threading.Event) -> None:
    failpoints.hit("fetcher.copy")
    ours, theirs = _array(view), _array(source)
    for at in range(0, len(ours), PIECE):
        look(stop)
        piece = ours[at : at + PIECE]
        # Releases the GIL, as a copy between views does not.
        np.copyto(piece, theirs[at : at + len(piece)])


def inspect(known: Canonical, source: memoryview, stop: threading.Event) -> bytes:
    """Check every byte of a delta shard and return what it changes, as `pack_changes` does."""
    failpoints.hit("fetcher.inspect")
    delta = parse_shard(source, known.kinds)
    look(stop)
    header = DeltaHeader(delta.index, delta.base_content_digest, delta.layout_digest)
    return pack_changes(header, (_change(known, change) for change in delta.changes.values()))


def patch(
    view: memoryview, index: int, known: Canonical, source: memoryview, stop: threading.Event
) -> None:
    """Change the tensors of canonical shard `index` in `view`.

    When this raises, tensors before the bad one are changed.
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


def compose(view: memoryview, source: memoryview, fd: int, stop: threading.Event) -> None:
    """Fill `view` with the delta shard that makes tensors what they are in `source`.

    `view` has exactly its size. `fd` names these tensors, as `FetchApi.compose` writes it.
    """
    order = read_note(fd)
    tensors = [
        DenseTensor(name, dtype, tuple(shape), begin, end, bytes.fromhex(digest))
        for name, dtype, shape, begin, end, digest in order["tensors"]
    ]
    facts = order["shard"], order["base_content_digest"], order["layout_digest"]
    DenseDelta(*facts, tensors).write(view, source, lambda: look(stop))


def patch_slices(
    view: memoryview, base: memoryview, source: memoryview, fd: int, stop: threading.Event
) -> None:
    """Fill slices with what a delta shard makes of them; when this raises, they hold anything.

    `base` is the same shard of the version that is changed; `source` begins with the delta shard.
    `fd` says where the slices lie, as `FetchApi.patch_slices` writes it.
    """
    order = read_note(fd)
    kinds = {name: (dtype, tuple(shape)) for name, (dtype, shape) in order["kinds"].items()}
    delta = parse_shard(source[: order["size"]], kinds)
    if delta.base_content_digest != order["base_content_digest"]:
        raise WeightSyncError(
            Reason.SHARD_INVALID,
            f"they change content {delta.base_content_digest}, but the push was begun with "
            f"{order['base_content_digest']}; push the version again",
        )
    for name, (begin, run, counts, strides) in order["slices"]:
        span = SliceSpan(begin, run, tuple(counts), tuple(strides))
        _lay(span, view, base, delta.changes.get(name), stop)


def _lay(
    span: SliceSpan,
    view: memoryview,
    base: memoryview,
    change: TensorChange | None,
    stop: threading.Event,
) -> None:
    if change is None or not span.counts:
        at = 0
        for piece in span.pieces(base):
            look(stop)
            span.put(view, at, piece)
            at += len(piece)
        if change is not None:
            apply_change(change, _array(view[span.begin : span.begin + span.size]))
        return
    # Its runs lie apart: a change takes the slice in a row.
    row, at = np.empty(span.size, np.uint8), 0
    for piece in span.pieces(base):
        look(stop)
        row[at : at + len(piece)] = _array(piece)
        at += len(piece)
    apply_change(change, row)
    span.put(view, 0, row.data)
