"""A delta shard: a safetensors file of three byte tensors, checked in full before any use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from weightsync.delta.coding import (
    Coding,
    Counts,
    Positions,
    Values,
    corrupt,
    element_width,
    invalid,
    plane_sizes,
    total_bytes,
)
from weightsync.delta.delta_manifest import (
    CHECK_BYTES,
    DeltaManifest,
    Record,
    read_manifest,
    write_manifest,
)
from weightsync.errors import WeightSyncError
from weightsync.model.layout import build_header, check_shard, parse_header
from weightsync.model.manifest import ShardEntry, TensorEntry

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer


#: More than any header of three such tensors.
_MAX_HEADER = 1024


@dataclass(frozen=True, slots=True)
class Plane:
    """One plane in the shard's memory, `stored` as a view; `size` is that when unpacked."""

    stored: memoryview
    size: int
    packed: bool


@dataclass(frozen=True, slots=True)
class TensorChange:
    """The change of one tensor, checked; its planes are views of the shard's memory.

    Attributes:
        record: What the manifest tells of it.
        positions: Planes of the positions.
        values: Planes of the values.
    """

    record: Record
    positions: tuple[Plane, ...]
    values: tuple[Plane, ...]

    @property
    def name(self) -> str:
        """Name of the tensor in the checkpoint."""
        return self.record.name

    @property
    def digest(self) -> bytes:
        """xxh3-128 of the tensor's full new bytes; 16 bytes."""
        return self.record.digest

    @property
    def nnz(self) -> int:
        """Elements that change."""
        return self.record.counts.changed

    @property
    def width(self) -> int:
        """Bytes per element."""
        return element_width(self.record.dtype)

    @property
    def size(self) -> int:
        """Bytes of the whole tensor."""
        return total_bytes(self.record.dtype, self.record.shape)

    @property
    def elements(self) -> int:
        """Elements of the whole tensor."""
        return self.size // self.width


@dataclass(frozen=True, slots=True)
class ShardDelta:
    """A delta shard that was checked: what is not in it is unchanged.

    Attributes:
        index: Index of the shard in its push.
        base_content_digest: Of the version that it changes; 32 hexadecimal digits.
        layout_digest: Of the canonical layout; 32 hexadecimal digits.
        changes: The changed tensors by name, in the order of their names' UTF-8.
    """

    index: int
    base_content_digest: str
    layout_digest: str
    changes: Mapping[str, TensorChange]


def header_of(index: int, manifest: int, positions: int, values: int) -> bytes:
    """Return the only safetensors header, length included, of a delta shard with these sizes."""
    sizes = {"manifest": manifest, "positions": positions, "values": values}
    header, _ = build_header(
        (f"wsd1.{what}.{index:05}", "U8", (size,)) for what, size in sizes.items()
    )
    return len(header).to_bytes(8, "little") + header


def _sections(blob: memoryview) -> tuple[bytes, list[memoryview]]:
    """Return the header and the three data sections, which fill the blob exactly."""
    size = int.from_bytes(blob[:8], "little")
    if len(blob) < 8 or not 2 <= size <= min(_MAX_HEADER, len(blob) - 8):
        raise invalid(f"{len(blob)} bytes with a header of {size} are not a delta shard")
    try:
        entries: tuple[TensorEntry, ...] = check_shard(
            ShardEntry("delta", len(blob), size), parse_header(blob[8 : 8 + size])
        )
    except WeightSyncError as error:
        raise invalid(error.message) from None
    if len(entries) != 3:
        raise invalid(f"a shard of {len(entries)} tensors is not a delta shard")
    data = blob[8 + size :]
    return bytes(blob[: 8 + size]), [data[entry.begin : entry.end] for entry in entries]


class _Section:
    """Hands out the streams of a data section, one after the other."""

    def __init__(self, what: str, data: memoryview) -> None:
        self._what = what
        self._data = data
        self._at = 0

    def stream(
        self, name: str, sizes: tuple[int, ...], stored: tuple[int, ...], packed: tuple[bool, ...]
    ) -> tuple[memoryview, tuple[Plane, ...]]:
        ends = [self._at, *(self._at + size for size in accumulate(stored))]
        if ends[-1] > len(self._data):
            raise invalid(f"the {self._what} of {name[:100]!a} end after those of the shard")
        planes = tuple(
            Plane(self._data[begin:end], size, is_packed)
            for (begin, end), size, is_packed in zip(pairwise(ends), sizes, packed, strict=True)
        )
        self._at = ends[-1]
        return self._data[ends[0] : ends[-1]], planes

    def close(self) -> None:
        if self._at != len(self._data):
            raise invalid(f"{len(self._data) - self._at} bytes of {self._what} belong to no tensor")


def _check_stream(what: str, name: str, stream: memoryview, check: bytes) -> None:
    if xxhash.xxh3_64_digest(stream) != check:
        raise corrupt(f"the {what} of {name[:100]!a} do not match their checksum")


def _change(record: Record, positions: _Section, values: _Section) -> TensorChange:
    width = element_width(record.dtype)
    elements = total_bytes(record.dtype, record.shape) // width
    sizes = plane_sizes(record.coding, width, elements, record.counts)
    cut = len(sizes[0])
    where, where_planes = positions.stream(
        record.name, sizes[0], record.stored[:cut], record.packed[:cut]
    )
    what, what_planes = values.stream(
        record.name, sizes[1], record.stored[cut:], record.packed[cut:]
    )
    if cut:
        _check_stream("positions", record.name, where, record.checks[0])
    _check_stream("values", record.name, what, record.checks[1])
    return TensorChange(record, where_planes, what_planes)


def parse_shard(
    blob: Buffer | NDArray[np.uint8], expect: Mapping[str, tuple[str, tuple[int, ...]]]
) -> ShardDelta:
    """Return what a delta shard holds, every byte of it checked, and nothing yet unpacked.

    Memory is taken for the manifest's records only. Planes stay where they are: keep the blob until
    they are decoded.

    Args:
        blob: All bytes of the shard.
        expect: Dtype and shape of every tensor of the base, by name.

    Raises:
        DeltaError: SHARD_INVALID, DIGEST_MISMATCH for bytes that changed on their way, or
            LAYOUT_INVALID for other tensors than the base's.
    """
    view = (blob.data if isinstance(blob, np.ndarray) else memoryview(blob)).cast("B")
    header, sections = _sections(view)
    manifest = read_manifest(sections[0], expect)
    if header != header_of(manifest.index, *map(len, sections)):
        raise invalid("the shard's header is not that of a delta shard with its index")
    positions, values = _Section("positions", sections[1]), _Section("values", sections[2])
    changes = {record.name: _change(record, positions, values) for record in manifest.records}
    positions.close()
    values.close()
    return ShardDelta(
        manifest.index,
        manifest.base_content_digest,
        manifest.layout_digest,
        MappingProxyType(changes),
    )


#: Bytes that are copied at a time.
_PIECE = 4 << 20
_NO_CHECK = bytes(CHECK_BYTES)


class DenseTensor(NamedTuple):
    """A tensor that is new as a whole.

    Attributes:
        name: Its name.
        dtype: safetensors dtype name.
        shape: Dimensions in elements; none of them is 0.
        begin: Where its bytes begin in the source.
        end: Where they end.
        digest: xxh3-128 of them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    digest: bytes


class DenseDelta:
    """The delta shard that makes tensors what they are in a source, whatever they were.

    Args:
        index: Index of the shard in its push.
        base_content_digest: Of the version that it changes; 32 hexadecimal digits.
        layout_digest: Signature of its tensors; 32 hexadecimal digits.
        tensors: Those that it makes, in any order.

    Attributes:
        size: Its bytes.
        header_size: Bytes of its safetensors header, without those of the length.
    """

    def __init__(
        self,
        index: int,
        base_content_digest: str,
        layout_digest: str,
        tensors: Sequence[DenseTensor],
    ) -> None:
        self._index = index
        self._facts = index, base_content_digest, layout_digest
        self._tensors = sorted(tensors, key=lambda tensor: tensor.name.encode())
        self._values = sum(tensor.end - tensor.begin for tensor in tensors)
        # What the checks are changes no size.
        head = self._head([_NO_CHECK] * len(tensors))
        self.header_size = int.from_bytes(head[:8], "little")
        self.size = len(head) + self._values

    def write(
        self, target: memoryview, source: memoryview, on_piece: Callable[[], None] = lambda: None
    ) -> None:
        """Fill `target`, of `size` bytes, from the memory that the tensors lie in.

        Args:
            target: Takes the shard.
            source: Has the tensors.
            on_piece: Called now and then; what it raises ends the work.
        """
        ours, theirs = _array(target), _array(source)
        at = self.size - self._values
        checks = []
        for tensor in self._tensors:
            check = xxhash.xxh3_64()
            for begin in range(tensor.begin, tensor.end, _PIECE):
                on_piece()
                piece = theirs[begin : min(begin + _PIECE, tensor.end)]
                # Releases the GIL, as a copy between views does not.
                np.copyto(ours[at : at + len(piece)], piece)
                check.update(ours[at : at + len(piece)].data)
                at += len(piece)
            checks.append(check.digest())
        head = self._head(checks)
        np.copyto(ours[: len(head)], np.frombuffer(head, np.uint8))

    def _head(self, checks: Sequence[bytes]) -> bytes:
        records = tuple(map(_record, self._tensors, checks))
        body = write_manifest(DeltaManifest(*self._facts, records))
        return header_of(self._index, len(body), 0, self._values) + body


def _record(tensor: DenseTensor, check: bytes) -> Record:
    size = tensor.end - tensor.begin
    return Record(
        tensor.name,
        tensor.dtype,
        tensor.shape,
        tensor.digest,
        Coding(Positions.NONE, Values.DENSE),
        Counts(size // element_width(tensor.dtype)),
        (size,),
        (False,),
        (b"", check),
    )


def _array(view: memoryview) -> NDArray[np.uint8]:
    # Of a slice of its own: an array that a traceback still holds must not keep the view.
    return np.frombuffer(view[:], np.uint8)
