"""What differs between two checkpoints, tensor by tensor, and what a delta of them would take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weightsync_client.source.source import Source
from weightsync_client.source.tensors import Scratch, SourceTensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


_NO_DIGEST = "0" * 32
_FLOATS = frozenset(
    ("F8_E5M2", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F16", "BF16", "F32", "F64")
)
_INTEGERS = frozenset(("U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F8_E8M0"))
#: Changes that are looked at together.
_PIECE = 1 << 22


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor that both checkpoints hold, alike in dtype and shape.

    Attributes:
        elements: Their number; of dtypes below a byte, bytes.
        changed: Elements whose bits differ.
        delta_bytes: What a delta takes, written as `coding`.
        packed_bytes: The same with zstd.
        distances: Changed elements by distance in ulps, or for integers in units: "1", "2-3", "4-7"
            and so on; empty for dtypes that know none.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    changed: int
    coding: str
    delta_bytes: int
    packed_bytes: int
    dense_bytes: int
    distances: dict[str, int]


@dataclass(frozen=True, slots=True)
class CheckpointDiff:
    """What differs between two checkpoints; `tensors` are those in both, sorted by name.

    `reshaped` has the names whose dtype or shape differs.
    """

    tensors: tuple[TensorDifference, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    reshaped: tuple[str, ...]
    elements: int = 0
    changed: int = 0
    changed_fraction: float = 0.0
    delta_bytes: int = 0
    packed_bytes: int = 0
    dense_bytes: int = 0
    bytes_by_coding: dict[str, int] = field(default_factory=dict)
    distances: dict[str, int] = field(default_factory=dict)


def compare(before: Source, after: Source) -> CheckpointDiff:
    """Compare two checkpoints bit by bit; one tensor of each is held at a time.

    Raises a ClientError if a file cannot be read.
    """
    old = {tensor.name: tensor for tensor in before.tensors}
    new = {tensor.name: tensor for tensor in after.tensors}
    common = sorted(old.keys() & new.keys())
    alike = [n for n in common if (old[n].dtype, old[n].shape) == (new[n].dtype, new[n].shape)]
    tensors = tuple(_compare(old[name], new[name]) for name in alike)
    by_coding: Counter[str] = Counter()
    distances: Counter[str] = Counter()
    for tensor in tensors:
        by_coding[tensor.coding] += tensor.delta_bytes
        distances.update(tensor.distances)
    elements, changed = (sum(getattr(t, what) for t in tensors) for what in ("elements", "changed"))
    return CheckpointDiff(
        tensors,
        only_before=tuple(sorted(old.keys() - new.keys())),
        only_after=tuple(sorted(new.keys() - old.keys())),
        reshaped=tuple(sorted(set(common) - set(alike))),
        elements=elements,
        changed=changed,
        changed_fraction=changed / elements if elements else 0.0,
        delta_bytes=sum(t.delta_bytes for t in tensors),
        packed_bytes=sum(t.packed_bytes for t in tensors),
        dense_bytes=sum(t.dense_bytes for t in tensors),
        bytes_by_coding=dict(by_coding),
        distances={name: distances[name] for name in sorted(distances, key=_low)},
    )


def _compare(old: SourceTensor, new: SourceTensor) -> TensorDifference:
    from weightsync.delta import Item, encode_shard
    from weightsync.delta.coding import element_width
    from weightsync_client.snapshot.host_tensor import all_bytes

    scratch = Scratch()
    before, after = all_bytes(old, scratch), all_bytes(new, scratch)
    # The digest is not looked at; a given one spares digesting what is unchanged.
    item = Item(new.name, new.dtype, new.shape, before, after, b"\0" * 16)
    plain, packed = (
        encode_shard(
            [item], zstd=zstd, base_content_digest=_NO_DIGEST, layout_digest=_NO_DIGEST, index=0
        ).stats[0]
        for zstd in (False, True)
    )
    return TensorDifference(
        new.name,
        new.dtype,
        new.shape,
        elements=new.size // element_width(new.dtype),
        changed=plain.nnz,
        coding=plain.coding,
        delta_bytes=plain.stored_bytes,
        packed_bytes=packed.stored_bytes,
        dense_bytes=new.size,
        distances=_distances(before, after, new.dtype) if plain.nnz else {},
    )


def _distances(before: NDArray[np.uint8], after: NDArray[np.uint8], dtype: str) -> dict[str, int]:
    import numpy as np

    if dtype not in _FLOATS | _INTEGERS:
        return {}
    from weightsync.delta.coding import element_width
    from weightsync.delta.kernels import chosen

    width = element_width(dtype)
    counts = np.zeros(8 * width + 2, np.int64)
    # As many of these are no more than a number as that has bits.
    powers = np.array([1 << bit for bit in range(8 * width)], f"<u{width}")
    step = _PIECE * width
    for at in range(0, len(before), step):
        old, new = (data[at : at + step].view(f"<u{width}") for data in (before, after))
        where, values = chosen().find(old, new)
        low, high = _ordered(old[where], dtype), _ordered(values, dtype)
        distance = np.where(low < high, high - low, low - high)
        counts += np.bincount(np.searchsorted(powers, distance, "right"), minlength=len(counts))
    return {
        str(1 << k) if k == 0 else f"{1 << k}-{(2 << k) - 1}": int(counts[k + 1])
        for k in range(len(counts) - 1)
        if counts[k + 1]
    }


def _ordered(bits: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return unsigned numbers in the order of the values, one apart from one value to the next."""
    import numpy as np

    top = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    if dtype in _FLOATS:
        # Sign and magnitude; -0.0 lies one below 0.0.
        return np.where(bits & top, ~bits, bits | top)
    return bits ^ top if dtype.startswith("I") else bits


def _low(name: str) -> int:
    return int(name.partition("-")[0])


def largest(difference: CheckpointDiff, count: int) -> Iterator[TensorDifference]:
    """Yield the tensors that changed, most changed elements first."""
    ordered = sorted(difference.tensors, key=lambda t: (-t.changed, t.name))
    yield from (tensor for tensor in ordered[:count] if tensor.changed)
