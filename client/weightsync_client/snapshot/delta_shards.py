"""The shards of a delta: grouped, encoded and packed while those before are on their way."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from weightsync.delta import EncodedShard, Encoder, Item, encode_shard
from weightsync.delta.coding import element_width
from weightsync.errors import Reason
from weightsync.model.digest import content_digest, tensor_digest
from weightsync.model.layout import MAX_NAME_BYTES
from weightsync_client.errors import refuse
from weightsync_client.push_reasons import PAYS_BELOW, DeltaUnsuitable, Fallback
from weightsync_client.snapshot.host_tensor import SnapshotTensor, all_bytes, snapshot_source
from weightsync_client.snapshot.snapshot import BaseVersion, Snapshot, room_for
from weightsync_client.source.shards import Shard, blob_shard
from weightsync_client.source.slice_shards import SliceShard
from weightsync_client.source.tensor_stream import TensorStream
from weightsync_client.source.tensors import Scratch, SourceTensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MOST_THREADS = 8


def default_threads() -> int:
    """Return how many threads encode: the trainer's own work needs the rest of a large host."""
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))


class DeltaShards(Iterable[Shard]):
    """What changed since a base. Shards stay until the commit, because the base becomes them.

    Iterating makes the shards; iterating again gives those that were made, then makes the rest.
    Once all were made, the caller's tensors are not in use any more.

    Each of `groups` becomes one shard. `base` must not change meanwhile. If the share of changed
    elements reaches `most_changed`, all is sent. With `partial`, tensors that the groups lack stay
    as in the base. With `every`, unchanged groups make a shard as well.
    """

    def __init__(
        self,
        groups: Iterator[list[SourceTensor]],
        base: BaseVersion,
        *,
        zstd: bool,
        most_changed: float = 1.0,
        partial: bool = False,
        every: bool = False,
    ) -> None:
        self.threads = default_threads()
        self._base = base
        self._most_changed = most_changed
        self._partial = partial
        self._every = every
        self._groups = groups
        #: Taken from the groups and not encoded yet.
        self._taken: list[SourceTensor] = []
        self._encoder = Encoder(zstd=zstd, threads=self.threads)
        self._made: list[EncodedShard] = []
        self._digests: dict[str, bytes] = {}
        self._compared = self._size = self._elements = self._changed = 0
        self.whole = False
        #: Tensors by coding.
        self.codings: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Shard]:
        at = 0
        while at < len(self._made) or self._make():
            made = self._made[at]
            yield blob_shard(made.blob.data, at, f"delta-{at:05}.safetensors")
            at += 1

    def _make(self) -> bool:
        if self.whole:
            return False
        while taken := next(self._groups, []):
            self._taken = taken
            # Nobody else holds the tensors of an iterable.
            del taken
            encoded = self._encode(self._taken)
            self._digests |= {stats.name: stats.digest for stats in encoded.stats}
            self._taken = []
            if self._every or any(stats.changed for stats in encoded.stats):
                self._made.append(encoded)
                return True
        if not self._partial:
            self._refuse_missing()
        self.whole = True
        if not self._made:
            # Nothing changed: one shard says so.
            self._made.append(self._encode([]))
            return True
        return False

    def _encode(self, group: list[SourceTensor]) -> EncodedShard:
        for tensor in group:
            self._refuse_other(tensor)
        size = sum(tensor.size for tensor in group)
        if not room_for(size):
            raise DeltaUnsuitable(
                Fallback.NO_ROOM, "there is not enough memory for the shards of a delta"
            )
        encoded = self._encoder.encode_shard(
            self._base.items(group, Scratch()),
            base_content_digest=self._base.content_digest,
            layout_digest=self._base.signature,
            index=len(self._made),
        )
        self._compared += size
        self._size += encoded.blob.nbytes
        for stats in encoded.stats:
            self._changed += stats.nnz
            dtype = self._base.tensors[stats.name].dtype
            self._elements += stats.dense_bytes // element_width(dtype)
            self.codings[stats.coding] += 1
        if not self._partial:
            self._check_pays()
        return encoded

    def _check_pays(self) -> None:
        # A quarter of all bytes is a fair sample; and more than all is never sent.
        judged = self._compared * 4 >= self._base.size
        if judged and self._changed > self._most_changed * self._elements:
            raise DeltaUnsuitable(
                Fallback.TOO_DENSE, f"{self.changed_fraction:.0%} of the elements compared changed"
            )
        dense = self._compared if judged else self._base.size
        if self._compared and self._size > PAYS_BELOW * dense:
            raise DeltaUnsuitable(
                Fallback.TOO_DENSE,
                f"{self._size} bytes of changes in {self._compared} bytes are hardly smaller",
            )

    def _refuse_other(self, tensor: SourceTensor) -> None:
        old = self._base.tensors.get(tensor.name)
        if old is not None and (old.dtype, old.shape) == (tensor.dtype, tensor.shape):
            return
        if self._partial:
            kept = f"{old.dtype} {list(old.shape)}" if old is not None else "not at all"
            raise refuse(
                Reason.LAYOUT_INVALID,
                f"tensor {tensor.name!r} is {tensor.dtype} {list(tensor.shape)}, in version "
                f"{self._base.version}, whose other tensors a partial push keeps, it is {kept}; "
                "leave it out, or push all tensors",
            )
        raise DeltaUnsuitable(
            Fallback.LAYOUT_CHANGED,
            f"version {self._base.version} has no {tensor.label} of that dtype and shape",
        )

    def _refuse_missing(self) -> None:
        missing = self._base.tensors.keys() - self._digests.keys()
        if missing:
            raise DeltaUnsuitable(
                Fallback.LAYOUT_CHANGED,
                f"version {self._base.version} has {min(missing)!r} as well",
            )

    @property
    def begun(self) -> bool:
        return bool(self._digests)

    def read_again(self) -> tuple[dict[str, SnapshotTensor], list[SourceTensor]]:
        """Return what was taken from the groups, as if nothing had been.

        The base takes the values of the encoded tensors, and is a mixture afterwards. Returns
        those, and all that was taken. Raises DATA_CORRUPT if the base was not what it was taken
        for.
        """
        base = self._base
        if not isinstance(base, Snapshot):
            raise TypeError("a partial push is not read again")
        base.advance(self.blobs, self.threads)
        encoded = {name: base.tensors[name] for name in self._digests}
        sources = [snapshot_source(name, old) for name, old in encoded.items()]
        for tensor in sources:
            if tensor_digest(all_bytes(tensor, Scratch()).data) != self._digests[tensor.name]:
                raise refuse(
                    Reason.DATA_CORRUPT,
                    f"the copy of version {self._base.version} that this client compares with is "
                    f"damaged in {tensor.name!r}; push again, and everything is sent",
                )
        return encoded, sources + self._taken

    def close(self) -> None:
        self._encoder.close()
        self._base.forget()
        self._base = replace(self._base, tensors={})
        self._groups, self._taken, self._made = iter(()), [], []

    @property
    def blobs(self) -> list[NDArray[np.uint8]]:
        return [made.blob for made in self._made]

    @property
    def sizes(self) -> dict[int, int]:
        return {made.index: made.blob.nbytes for made in self._made}

    @property
    def digests(self) -> Mapping[str, bytes]:
        return self._digests

    @property
    def base_content_digest(self) -> str:
        return self._base.content_digest

    @property
    def base_version(self) -> int:
        return self._base.version

    @property
    def content_digest(self) -> str:
        return content_digest(
            (name, old.dtype, old.shape, self._digests.get(name, old.digest))
            for name, old in self._base.tensors.items()
        )

    @property
    def changed_fraction(self) -> float:
        return self._changed / self._elements if self._elements else 0.0


def of_boxes(shards: Iterable[Shard]) -> Iterator[list[SourceTensor]]:
    """Yield the boxes that are sent of each shard; DeltaUnsuitable: a name is too long."""
    for shard in shards:
        boxes = [local.bytes for local in shard.sent] if isinstance(shard, SliceShard) else []
        for box in boxes:
            if len(box.name.encode()) > MAX_NAME_BYTES:
                raise DeltaUnsuitable(
                    Fallback.REFUSED, f"{box.name[:100]!r}... is too long for a name"
                )
        if boxes:
            yield boxes


def box_deltas(shards: Iterable[Shard], deltas: DeltaShards) -> list[Shard]:
    """Return shards sent as what changed; the caller's tensors are not in use any more.

    All are made first: what a process has declared of a shard stays so. `deltas` has the groups
    that `of_boxes` makes of `shards`, none made yet. Raises DeltaUnsuitable if it would not be much
    less than all.
    """
    made = iter(deltas)
    return [
        shard.as_changed(next(made), deltas.digests)
        if isinstance(shard, SliceShard) and shard.sent
        else shard
        for shard in shards
    ]


#: Bytes of one shard, or a sixteenth of all source bytes: the first is on its way early, and a
#: large model is no heap of little files. A thousand hosts that follow a bucket ask for each
#: object, and a bucket answers so many requests in a second and no more.
_GROUP_BYTES, _GROUPS = 64 << 20, 16
#: Below it a sample says that next to nothing has changed.
_LEAST_RATIO = 1e-4


def by_size(
    tensors: Iterable[SourceTensor], threads: int, ratio: float = 1.0
) -> Iterator[list[SourceTensor]]:
    """Yield groups for one shard each, largest tensors first.

    Beside its largest tensor, which keeps one thread busy, a group has enough for the others.
    `ratio` is the size of its shard by that of its tensors, as seen in a sample.
    """
    ordered = sorted(tensors, key=lambda tensor: -tensor.size)
    worth = int(_GROUP_BYTES / max(ratio, _LEAST_RATIO))
    least = max(worth, sum(tensor.size for tensor in ordered) // _GROUPS)
    yield from _grouped(ordered, least, threads)


def as_they_come(flow: TensorStream, total: int) -> Iterator[list[SourceTensor]]:
    """Yield groups in the order of an iterable of about `total` bytes; one is held at a time."""
    yield from _grouped(flow, min(max(_GROUP_BYTES, total // _GROUPS), flow.shard_bytes), 0)


def _grouped(
    tensors: Iterable[SourceTensor], least: int, firsts: int
) -> Iterator[list[SourceTensor]]:
    """Yield groups of at least so many bytes, and so many times those of their first tensor."""
    group: list[SourceTensor] = []
    size = 0
    for tensor in tensors:
        group.append(tensor)
        size += tensor.size
        if size >= max(least, firsts * group[0].size):
            yield group
            group, size = [], 0
    if group:
        yield group


#: Pieces, and bytes of each: together some 4 MB, encoded within milliseconds.
_PIECES, _PIECE_BYTES = 64, 64 << 10
#: Of fewer bytes nothing is gained by knowing before.
_LEAST_BYTES = 16 << 20
_NO_DIGEST = "0" * 32


class Sample(NamedTuple):
    """What pieces show: the `ratio` of a delta's bytes to all, the share of elements `changed`."""

    ratio: float
    changed: float


def _places(tensors: Sequence[SourceTensor], total: int) -> Iterator[tuple[SourceTensor, int]]:
    """Yield tensors and offsets that lie evenly in the sequence of all bytes."""
    step, wanted, passed = total // _PIECES, 0, 0
    for tensor in tensors:
        while wanted < passed + tensor.size:
            yield tensor, wanted - passed
            wanted += step
        passed += tensor.size


def sampled(tensors: Sequence[SourceTensor], base: Snapshot, *, zstd: bool) -> Sample:
    """Return how a delta would come out, roughly; zeros for what is small anyway."""
    total = sum(tensor.size for tensor in tensors)
    if total < _LEAST_BYTES:
        return Sample(0.0, 0.0)
    items, scratch, opened, elements = [], Scratch(), None, 0
    for number, (tensor, offset) in enumerate(_places(tensors, total)):
        if opened is None or opened[0] is not tensor:
            opened = tensor, tensor.reader(scratch)
        width = element_width(tensor.dtype)
        begin = min(offset, max(0, tensor.size - _PIECE_BYTES)) // width * width
        end = min(begin + _PIECE_BYTES, tensor.size)
        before = base.tensors[tensor.name].window(begin, end)
        after = np.frombuffer(opened[1](begin, end), np.uint8)
        # Pieces in bytes: shapes do not matter, and dtypes below a byte have none of their own.
        dtype = {1: "U8", 2: "U16", 4: "U32", 8: "U64"}[width]
        elements += len(after) // width
        items.append(Item(str(number), dtype, (len(after) // width,), before, after, b"\0" * 16))
    shard = encode_shard(
        items, zstd=zstd, base_content_digest=_NO_DIGEST, layout_digest=_NO_DIGEST, index=0
    )
    streams = sum(stats.stored_bytes for stats in shard.stats)
    dense = sum(stats.dense_bytes for stats in shard.stats)
    return Sample(streams / dense, sum(stats.nnz for stats in shard.stats) / elements)
