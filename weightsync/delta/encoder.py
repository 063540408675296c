"""The sender's side: what differs between two versions, as a delta shard, on several threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

import numpy as np
import xxhash

from weightsync.delta.coding import (
    SKIP,
    Coded,
    Coding,
    Counts,
    DeltaError,
    Positions,
    Values,
    element_width,
    pack,
    total_bytes,
)
from weightsync.delta.delta_manifest import DeltaManifest, Record, write_manifest
from weightsync.delta.delta_shard import header_of
from weightsync.delta.kernels import chosen
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.digest import tensor_digest
from weightsync.model.layout import check_shard
from weightsync.model.manifest import ShardEntry, TensorEntry

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from weightsync.delta.coding import Bytes, Indices, Words

#: Elements whose bits of a bitmap are made at a time; a multiple of 8.
_PIECE = 1 << 22


@dataclass(frozen=True, slots=True)
class Changes:
    """What differs between a tensor before and after.

    Attributes:
        name: Name in the checkpoint.
        dtype: safetensors dtype name.
        shape: Dimensions in elements.
        index: Positions of the elements that differ, strictly increasing.
        before: Their values before, as unsigned integers of the element's width.
        after: Their values after.
        new_digest: Gives xxh3-128 of all bytes after; asked for if something changed.
        same_digest: Gives the same if nothing did.
        all_bytes: Gives all bytes after, for a tensor that is smaller when it is dense.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    index: Indices
    before: Words
    after: Words
    new_digest: Callable[[], bytes]
    same_digest: Callable[[], bytes]
    all_bytes: Callable[[], NDArray[np.uint8]]

    @property
    def size(self) -> int:
        """Bytes of the whole tensor."""
        return total_bytes(self.dtype, self.shape)

    def check(self) -> None:
        """Prove what can be proved without the tensor.

        Raises:
            DeltaError: REQUEST_INVALID.
        """
        width = element_width(self.dtype)
        elements = self.size // width
        good = (
            self.index.ndim == 1
            and len(self.index) == len(self.before) == len(self.after)
            and self.before.dtype == self.after.dtype == np.dtype(f"<u{width}")
            and bool(np.all(self.index[:1] >= 0) and np.all(self.index[-1:] < elements))
            and bool(np.all(self.index[1:] > self.index[:-1]))
            and not bool(np.any(self.before == self.after))
        )
        if not good:
            raise DeltaError(
                Reason.REQUEST_INVALID,
                f"the changes of {self.name[:100]!a} must be ascending positions within it, each "
                f"with one value of {width} bytes before and one after",
            )


def coded_changes(changes: Changes, coding: Coding) -> Coded:
    """Return the planes of changes; see `kernels.plain.encode`. There is one change at least."""
    width = element_width(changes.dtype)
    before, after = (
        np.ascontiguousarray(each).view(np.uint8) for each in (changes.before, changes.after)
    )
    # Side by side, all of them differ: their planes of values are those of the whole tensor.
    coded = chosen().encode(before, after, width, Coding(Positions.BITMAP, coding.values))
    if coding.positions is Positions.BITMAP:
        return Coded(coded.counts, [_bitmap(changes.index, changes.size // width)], coded.values)
    entries = chosen().entries(changes.index, SKIP[coding.positions])
    columns = entries.view(np.uint8).reshape(-1, entries.itemsize)
    planes = [np.ascontiguousarray(columns[:, at]) for at in range(entries.itemsize)]
    counts = replace(coded.counts, skips=len(entries) - len(changes.index))
    return Coded(counts, planes, coded.values)


def _bitmap(index: Indices, elements: int) -> Bytes:
    bitmap = np.empty(-(-elements // 8), np.uint8)
    marks = np.empty(min(_PIECE, elements), bool)
    for at in range(0, elements, _PIECE):
        piece = marks[: min(_PIECE, elements - at)]
        piece[:] = False
        first, last = np.searchsorted(index, (at, at + len(piece)))
        piece[index[first:last] - at] = True
        packed = np.packbits(piece, bitorder="little")
        bitmap[at // 8 : at // 8 + len(packed)] = packed
    return bitmap


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def spread(
    pool: ThreadPoolExecutor,
    threads: int,
    call: Callable[[_Item], _Result],
    items: Iterable[_Item],
) -> list[_Result]:
    """Return what `call` gives for each item, in order; nothing runs any more when this returns.

    Threads take items themselves, the first ones first. Handing over each alone, as `map` of a pool
    does, has the caller hold the GIL just when they want it: with hundreds of small tensors that
    costs two threads a tenth to a fifth of their time. An error of one call ends the work.
    """
    todo = deque(enumerate(items))
    found: dict[int, _Result] = {}

    def work() -> None:
        try:
            while True:
                try:
                    at, item = todo.popleft()
                except IndexError:
                    return
                found[at] = call(item)
        except BaseException:
            todo.clear()
            raise

    count = len(todo)
    futures: list[Future[None]] = []
    try:
        futures += (pool.submit(work) for _ in range(min(threads, count)))
        wait(futures)
    finally:
        # Where the caller is interrupted, nobody begins with another one.
        todo.clear()
        wait(futures)
    for future in futures:
        future.result()
    return [found[at] for at in range(count)]


#: Density from which the next coding of positions is the smaller one.
_GAP8_FROM, _BITMAP_FROM = 0.0025, 0.125
#: Tensors up to so many elements are counted in full, others in so many runs of so many elements.
_COUNTED, _RUNS, _RUN = 1 << 18, 32, 1 << 10
_HEX = frozenset("0123456789abcdef")


class Item(NamedTuple):
    """A tensor before and after; a tuple of the first five does as well.

    Attributes:
        name: Name in the checkpoint.
        dtype: safetensors dtype name.
        shape: Dimensions in elements.
        base: All bytes before; contiguous.
        new: All bytes after; contiguous.
        base_digest: xxh3-128 of `base` where it is known; it saves digesting what is unchanged.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    base: NDArray[np.uint8]
    new: NDArray[np.uint8]
    base_digest: bytes | None = None

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return len(self.new)

    def all_bytes(self) -> NDArray[np.uint8]:
        """Return all bytes after."""
        return self.new

    def check(self) -> None:
        """Prove what can be proved without a digest.

        Raises:
            DeltaError: LAYOUT_INVALID or REQUEST_INVALID.
        """
        _check_tensor(self.name, self.dtype, self.shape, self.base, self.new)

    def new_digest(self) -> bytes:
        """Return xxh3-128 of them."""
        return tensor_digest(self.new.data)

    def same_digest(self) -> bytes:
        """Return the same where nothing changed."""
        return self.base_digest or self.new_digest()


def _check_tensor(
    name: str, dtype: str, shape: tuple[int, ...], base: NDArray[np.uint8], new: NDArray[np.uint8]
) -> None:
    entry = TensorEntry(name, dtype, shape, 0, 0, len(new))
    try:
        check_shard(ShardEntry("delta", 108 + len(new), 100), [entry])
    except WeightSyncError as error:
        raise DeltaError(error.reason, error.message) from None
    for data in (base, new):
        flat = data.dtype == np.uint8 and data.ndim == 1 and data.flags.c_contiguous
        if not flat or len(data) != len(new):
            raise DeltaError(
                Reason.REQUEST_INVALID,
                f"tensor {name[:100]!a} needs {len(new)} contiguous bytes before "
                f"and after; got {data.dtype} {list(data.shape)}",
            )


class WholeTensor(NamedTuple):
    """A tensor whose bytes before are not known here: all of it is coded, or nothing.

    Attributes:
        name: Name in the checkpoint.
        dtype: safetensors dtype name.
        shape: Dimensions in elements.
        new: All bytes after; contiguous.
        base_digest: xxh3-128 of those before; where it is theirs, nothing changed.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    new: NDArray[np.uint8]
    base_digest: bytes

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return len(self.new)

    def all_bytes(self) -> NDArray[np.uint8]:
        """Return all bytes after."""
        return self.new

    def check(self) -> None:
        """Prove what can be proved without a digest; see `Item.check`."""
        _check_tensor(self.name, self.dtype, self.shape, self.new, self.new)

    def new_digest(self) -> bytes:
        """Return xxh3-128 of them."""
        return tensor_digest(self.new.data)

    def same_digest(self) -> bytes:
        """Return the same where nothing changed."""
        return self.base_digest


class Later(NamedTuple):
    """A tensor that is read when a thread comes to encode it, by that thread.

    Attributes:
        name: Name in the checkpoint.
        dtype: safetensors dtype name.
        shape: Dimensions in elements.
        read: Gives its item; that is not in use any more when the same thread reads the next.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Item | WholeTensor]

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return total_bytes(self.dtype, self.shape)


if TYPE_CHECKING:
    _Bare = tuple[str, str, tuple[int, ...], NDArray[np.uint8], NDArray[np.uint8]]
    #: What an encoder takes for a tensor.
    _Given = Item | WholeTensor | Later | Changes | _Bare


@dataclass(frozen=True, slots=True)
class TensorStats:
    """What became of one tensor.

    Attributes:
        name: Its name.
        changed: Whether it is in the shard.
        nnz: Elements that differ.
        coding: Such as `gap8+sm`, `dense` or `unchanged`.
        stored_bytes: Bytes of its streams in the shard.
        dense_bytes: Bytes of the tensor.
        digest: xxh3-128 of its new bytes.
    """

    name: str
    changed: bool
    nnz: int
    coding: str
    stored_bytes: int
    dense_bytes: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class EncodedShard:
    """A delta shard to push.

    Attributes:
        index: Its index in the push.
        blob: A safetensors file, byte for byte.
        stats: Of every tensor given, in the given order.
    """

    index: int
    blob: NDArray[np.uint8]
    stats: tuple[TensorStats, ...]


class _Tensor(NamedTuple):
    stats: TensorStats
    record: Record | None
    positions: list[NDArray[np.uint8] | bytes]
    values: list[NDArray[np.uint8] | bytes]


def _check_bindings(digests: Sequence[str], index: int) -> None:
    if any(len(digest) != 32 or not set(digest) <= _HEX for digest in digests):
        raise DeltaError(
            Reason.REQUEST_INVALID, "a digest of base or layout is not 32 hexadecimal digits"
        )
    if not 0 <= index < 1 << 32:
        raise DeltaError(Reason.REQUEST_INVALID, f"shard must be from 0 to 4294967295, not {index}")


def _sampled_density(base: NDArray[np.uint8], new: NDArray[np.uint8], width: int) -> float:
    """Return the share of elements that differ, counted in runs spread over a large tensor."""
    elements = len(new) // width
    if elements <= _COUNTED:
        return float(chosen().count(base, new, width, _RUN, _RUN)) / max(elements, 1)
    # The last run may be cut short, which is one part in a thousand.
    runs = -(-elements // (elements // _RUNS))
    return float(chosen().count(base, new, width, _RUN, elements // _RUNS)) / (runs * _RUN)


def choose_coding(
    base: NDArray[np.uint8], new: NDArray[np.uint8], width: int, *, absolute: bool
) -> Coding:
    """Return the coding that is smallest at the density of the changes.

    With `absolute`, values replace differences.
    """
    return _coding_at(_sampled_density(base, new, width), width, absolute=absolute)


def _coding_at(density: float, width: int, *, absolute: bool) -> Coding:
    values = Values.SM if width == 2 and not absolute else Values.ABS
    if density < _GAP8_FROM:
        return Coding(Positions.GAP16, values)
    return Coding(Positions.GAP8 if density < _BITMAP_FROM else Positions.BITMAP, values)


def _stored(
    planes: Sequence[NDArray[np.uint8]], *, zstd: bool, signs: bool
) -> tuple[list[NDArray[np.uint8] | bytes], list[bool], bytes]:
    """Return the planes as stored, which of them are packed, and the checksum of all."""
    check = xxhash.xxh3_64()
    stored: list[NDArray[np.uint8] | bytes] = []
    packed: list[bool] = []
    for at, plane in enumerate(planes):
        # Signs are as good as random: packing them is time lost.
        frame = pack(plane) if zstd and not (signs and at == 0) else None
        # Kernels use their memory again for the next tensor.
        stored.append(plane.copy() if frame is None else frame)
        packed.append(frame is not None)
        check.update(plane.data if frame is None else frame)
    return stored, packed, check.digest()


class Encoder:
    """Encodes delta shards with threads of its own; use it as a context manager.

    Args:
        zstd: Pack planes with zstd: pays off below about 100 MB/s per core.
        threads: Threads over which the tensors of a shard are spread.
        absolute: Send new values in place of differences, for receivers that do not hold the base.
    """

    def __init__(self, *, zstd: bool, threads: int = 1, absolute: bool = False) -> None:
        self._zstd = zstd
        self._absolute = absolute
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "delta") if threads > 1 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def encode_shard(
        self,
        items: Sequence[_Given],
        *,
        base_content_digest: str,
        layout_digest: str,
        index: int,
    ) -> EncodedShard:
        """Return the shard from which `base` and nothing else becomes `new`, to the bit.

        Args:
            items: Tensors with distinct names; none changed, or none at all, is fine.
            base_content_digest: Of the version of which `base` are the bytes.
            layout_digest: Of the canonical layout.
            index: Index of the shard in its push.

        Raises:
            DeltaError: REQUEST_INVALID or LAYOUT_INVALID, naming the tensor.
        """
        kinds = (Changes, Later, WholeTensor)
        given = [item if isinstance(item, kinds) else Item(*item) for item in items]
        if len({item.name for item in given}) != len(given):
            raise DeltaError(Reason.LAYOUT_INVALID, "a tensor is given twice; give each once")
        _check_bindings((base_content_digest, layout_digest), index)
        order = sorted(given, key=lambda item: -item.size)
        done = {tensor.stats.name: tensor for tensor in self._encode_all(order)}
        changed = [done[name] for name in sorted(done) if done[name].record]
        blob = _assemble(changed, base_content_digest, layout_digest, index, zstd=self._zstd)
        return EncodedShard(index, blob, tuple(done[item.name].stats for item in given))

    def _encode_all(
        self, items: Sequence[Item | WholeTensor | Later | Changes]
    ) -> Iterable[_Tensor]:
        if self._pool is None:
            return map(self._encode, items)
        return spread(self._pool, self._threads, self._encode, items)

    def _compared(self, item: Item | WholeTensor | Changes) -> tuple[Coding, Coded]:
        width = element_width(item.dtype)
        if isinstance(item, WholeTensor):
            same = item.new_digest() == item.base_digest
            counts = Counts(0 if same else item.size // width)
            return Coding(Positions.NONE, Values.DENSE), Coded(counts, [], [item.new])
        if isinstance(item, Changes):
            density = len(item.index) * width / item.size if item.size else 0.0
            coding = _coding_at(density, width, absolute=self._absolute)
            if not len(item.index):
                return coding, Coded(Counts(0), [], [])
            return coding, coded_changes(item, coding)
        coding = choose_coding(item.base, item.new, width, absolute=self._absolute)
        return coding, chosen().encode(item.base, item.new, width, coding)

    def _encode(self, item: Item | WholeTensor | Later | Changes) -> _Tensor:
        if isinstance(item, Later):
            item = item.read()
        item.check()
        coding, (counts, positions, planes) = self._compared(item)
        nnz = counts.changed
        if not nnz:
            stats = TensorStats(item.name, False, 0, "unchanged", 0, item.size, item.same_digest())
            return _Tensor(stats, None, [], [])
        if sum(map(len, (*positions, *planes))) >= item.size:
            coding, positions = Coding(Positions.NONE, Values.DENSE), ()
            counts, planes = Counts(item.size // element_width(item.dtype)), (item.all_bytes(),)
        where = _stored(positions, zstd=self._zstd, signs=False)
        what = _stored(planes, zstd=self._zstd, signs=coding.values is Values.SM)
        stored = tuple(len(plane) for plane in where[0] + what[0])
        digest = item.new_digest()
        record = Record(
            item.name, item.dtype, item.shape, digest, coding, counts, stored,
            tuple(where[1] + what[1]), (where[2], what[2]),
        )  # fmt: skip
        stats = TensorStats(item.name, True, nnz, str(coding), sum(stored), item.size, digest)
        return _Tensor(stats, record, where[0], what[0])


def _assemble(
    tensors: Sequence[_Tensor],
    base_content_digest: str,
    layout_digest: str,
    index: int,
    *,
    zstd: bool,
) -> NDArray[np.uint8]:
    records = tuple(tensor.record for tensor in tensors if tensor.record)
    manifest = DeltaManifest(index, base_content_digest, layout_digest, records)
    body = write_manifest(manifest, zstd=zstd)
    positions = [plane for tensor in tensors for plane in tensor.positions]
    values = [plane for tensor in tensors for plane in tensor.values]
    sizes = [len(body), sum(map(len, positions)), sum(map(len, values))]
    parts = [header_of(index, *sizes), body, *positions, *values]
    blob = np.empty(sum(map(len, parts)), np.uint8)
    at = 0
    for part in parts:
        # Copied without the GIL, so that a trainer's other threads go on.
        np.copyto(blob[at : at + len(part)], np.frombuffer(part, np.uint8))
        at += len(part)
    return blob


def encode_shard(
    items: Sequence[_Given],
    *,
    zstd: bool,
    base_content_digest: str,
    layout_digest: str,
    index: int,
) -> EncodedShard:
    """Return a delta shard, encoded in the calling thread; see `Encoder.encode_shard`."""
    with Encoder(zstd=zstd) as encoder:
        return encoder.encode_shard(
            items,
            base_content_digest=base_content_digest,
            layout_digest=layout_digest,
            index=index,
        )
