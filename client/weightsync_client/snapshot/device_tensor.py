"""Tensors of the last version on the trainer's device: compared and advanced there.

Of a changed tensor the positions and the values before and after come to the host and, where the
device cannot digest it, all its bytes; of an unchanged one, nothing.

Beside an engine that generates on the device, each request to it waits milliseconds. So many are
asked at once: how many elements differ, for all of a width, and which, for some million changes.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from weightsync.delta import Changes, TensorChange
from weightsync.delta.coding import element_width
from weightsync.gpu.device_find import Finder, KernelFinder, Pair, TorchFinder
from weightsync.gpu.device_kernels import DeviceDigests, KernelError, Kernels, fits, kernels_of
from weightsync.model.tensor_bits import INTS
from weightsync_client.errors import invalid
from weightsync_client.push_reasons import DeltaUnsuitable, Fallback
from weightsync_client.snapshot.host_tensor import all_bytes, own_scratch
from weightsync_client.source.tensors import Scratch, SourceTensor, settle

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


logger = logging.getLogger(__name__)


#: Elements of a piece, which is looked at as a whole; a multiple of 16.
_PIECE = 1 << 26
#: Elements that are taken at a time, unless one piece has more that differ: positions take eight
#: bytes before they are narrowed.
_AT_ONCE = 1 << 24
#: Up to so many bytes come through pinned memory, which PyTorch keeps for the next time.
_PINNED = 256 << 20


@dataclass(frozen=True, slots=True)
class ChangedElements:
    """What differs between a tensor before and after, on its device.

    `index` has strictly increasing positions, int32 or int64. `before` and `after` are the words
    there.
    """

    index: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor


def find_changed(
    kernels: Kernels | None, pairs: Sequence[Pair]
) -> tuple[list[ChangedElements], list[torch.Tensor]]:
    """Return what differs in each pair of words, before and after, on one device.

    Both are flat, of the same dtype and length; without `kernels`, PyTorch's are used. Also returns
    integers on the device: if one is not 0, a tensor was written meanwhile, and the rest means
    nothing, but no position lies outside.

    Raises torch.OutOfMemoryError if the device has no room for what was found, and KernelError if
    the driver refused one of our kernels.
    """
    # Those of a width, which our kernels take together; at 0 all that PyTorch looks at.
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for number, (old, new) in sorted(enumerate(pairs), key=lambda each: each[1][0].element_size()):
        own = kernels is not None and fits(old, new)
        groups[old.element_size() if own else 0].append(number)
    found: dict[int, ChangedElements] = {}
    flags = []
    for width, numbers in groups.items():
        group = _Group(kernels if width else None, [pairs[number] for number in numbers])
        flags += group.take()
        found |= zip(numbers, group.found(), strict=True)
    return [found[number] for number in range(len(pairs))], flags


class _Group:
    """Pairs that one finder looks at, counted already; those of a width are in a row.

    Without `kernels`, PyTorch's are used.
    """

    def __init__(self, kernels: Kernels | None, pairs: Sequence[Pair]) -> None:
        self._pairs = pairs
        pieces = [
            (owner, (old[at : at + _PIECE], new[at : at + _PIECE]))
            for owner, (old, new) in enumerate(pairs)
            for at in range(0, len(old), _PIECE)
        ]
        #: Of each piece, the pair that it is a part of, and how many elements differ.
        self._owners = [owner for owner, _ in pieces]
        self._finder = _finder(kernels, [pair for _, pair in pieces], pairs[0][0].device)
        self._counts = self._finder.count(_go_on)
        sizes = [0] * len(pairs)
        for owner, count in zip(self._owners, self._counts, strict=True):
            sizes[owner] += count
        self._index = [_positions(old, size) for (old, _), size in zip(pairs, sizes, strict=True)]
        self._after = [new.new_empty(size) for (_, new), size in zip(pairs, sizes, strict=True)]

    def take(self) -> list[torch.Tensor]:
        """Fill in what differs; return flags that tell whether a pair was written meanwhile."""
        filled = [0] * len(self._pairs)
        return [self._take(batch, filled) for batch in self._batches()]

    def found(self) -> list[ChangedElements]:
        return [
            ChangedElements(index, old.index_select(0, index), after)
            for (old, _), index, after in zip(self._pairs, self._index, self._after, strict=True)
        ]

    def _batches(self) -> Iterator[list[int]]:
        batch: list[int] = []
        size = 0
        for number, count in enumerate(self._counts):
            if not count:
                continue
            if batch and (size + count > _AT_ONCE or self._words(number) != self._words(batch[0])):
                yield batch
                batch, size = [], 0
            batch.append(number)
            size += count
        if batch:
            yield batch

    def _words(self, number: int) -> torch.dtype:
        return self._pairs[self._owners[number]][0].dtype

    def _take(self, batch: Sequence[int], filled: list[int]) -> torch.Tensor:
        chosen = [False] * len(self._counts)
        for number in batch:
            chosen[number] = True
        ends = list(accumulate(self._counts[number] for number in batch))
        like = self._pairs[self._owners[batch[0]]][1]
        positions = torch.empty(ends[-1], dtype=torch.int64, device=like.device)
        after = like.new_empty(ends[-1])
        # Positions count from address 0, as pairs lie anywhere.
        changed = self._finder.take(chosen, 0, positions, after, _go_on)
        for number, end in zip(batch, ends, strict=True):
            owner, count = self._owners[number], self._counts[number]
            old, begin = self._pairs[owner][0], filled[owner]
            filled[owner] = begin + count
            places = positions[end - count : end].sub_(old.data_ptr() // old.element_size())
            # Should fewer differ by now, there are places that nobody has filled in.
            self._index[owner][begin : begin + count] = places.clamp_(0, len(old) - 1)
            self._after[owner][begin : begin + count] = after[end - count : end]
        return changed


def _finder(kernels: Kernels | None, pieces: Sequence[Pair], device: torch.device) -> Finder:
    if kernels is not None:
        return KernelFinder(kernels, pieces)
    longest = max((len(old) for old, _ in pieces), default=0)
    return TorchFinder(pieces, torch.empty(longest, dtype=torch.bool, device=device))


def _positions(old: torch.Tensor, size: int) -> torch.Tensor:
    dtype = torch.int32 if len(old) < 1 << 31 else torch.int64
    return torch.empty(size, dtype=dtype, device=old.device)


def _go_on(_: int) -> None:
    """Nothing in a trainer waits between two pieces."""


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


class DeviceTensor:
    """The bytes of one tensor as last committed, on its device; MemoryError: it has no room."""

    def __init__(self, tensor: SourceTensor) -> None:
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.digest = b""
        self._width = element_width(tensor.dtype)
        self._source: SourceTensor | None = tensor
        #: Positions (None: all) and values that the delta in hand will leave here.
        self._next: tuple[torch.Tensor | None, torch.Tensor] | None = None
        try:
            self._data = torch.empty(tensor.size, dtype=torch.uint8, device=tensor.device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from None

    def keep(self, offset: int, _: memoryview) -> None:
        """Take a copy of the whole tensor on its device when its first bytes are sent."""
        if offset == 0 and self._source is not None:
            self._data.copy_(self._flat(self._source))
            # Once a push has told that its tensors are free, they may change at once.
            settle(self._data.device)

    @property
    def device(self) -> torch.device:
        return self._data.device

    def seal(self, digest: bytes) -> None:
        self.digest, self._source = digest, None

    def fill(self, tensor: SourceTensor, _: Scratch) -> None:
        self._data.copy_(self._flat(tensor))
        self.seal(tensor.digest(own_scratch()))

    def window(self, begin: int, end: int) -> NDArray[np.uint8]:
        data: NDArray[np.uint8] = self._data[begin:end].cpu().numpy()
        return data

    def item(self, tensor: SourceTensor, _: Scratch) -> Changes:
        """Return what differs, for the encoder, and keep what `advance` needs, if there is room."""
        (changes,) = changes_of([(self, tensor)])
        return changes

    def _flat(self, tensor: SourceTensor) -> torch.Tensor:
        if tensor.flat is None:
            return torch.from_numpy(all_bytes(tensor, own_scratch()).copy()).to(self._data.device)
        return tensor.flat().to(self._data.device)

    def words(self, tensor: SourceTensor) -> tuple[torch.Tensor, torch.Tensor]:
        kind = INTS[self._width]
        return self._data.view(kind), self._flat(tensor).view(kind)

    def found(self, difference: ChangedElements, new: torch.Tensor) -> None:
        """Keep what `advance` needs, whichever is less."""
        index, after = difference.index, difference.after
        few = index.nbytes + after.nbytes < new.nbytes
        self._next = (index, after) if few else (None, new.clone())

    def advance(self, change: TensorChange) -> None:
        """Have the device make it what the last `item` told; the change brings its digest."""
        if self._next is None:
            msg = f"tensor {change.name!r} was not compared"
            raise RuntimeError(msg)
        index, values = self._next
        words = self._data.view(INTS[self._width])
        if index is None:
            words.copy_(values)
        else:
            words.index_copy_(0, index.long(), values)
        self.digest = change.digest
        self.forget()

    def forget(self) -> None:
        self._next = None


def changes_of(pairs: Sequence[tuple[DeviceTensor, SourceTensor]]) -> list[Changes]:
    """Return what differs in tensors held on one device; see `SnapshotTensor.item`.

    Raises REQUEST_INVALID if one was changed meanwhile, DeltaUnsuitable if there is no room.
    """
    kernels = kernels_of(pairs[0][0].device)
    try:
        try:
            return _changes_of(kernels, pairs)
        except KernelError as error:
            # Such as no room for them beside what PyTorch holds, whose own need no more of it.
            logger.warning("weightsync: PyTorch's kernels compare, ours did not: %s", error)
            return _changes_of(None, pairs)
    except torch.OutOfMemoryError as error:
        raise DeltaUnsuitable(
            Fallback.NO_ROOM, f"the device is too full to compare: {error}"
        ) from None


def _changes_of(
    kernels: Kernels | None, pairs: Sequence[tuple[DeviceTensor, SourceTensor]]
) -> list[Changes]:
    words = [base.words(tensor) for base, tensor in pairs]
    found, meanwhile = find_changed(kernels, words)
    for (base, _), difference, (_, new) in zip(pairs, found, words, strict=True):
        base.found(difference, new)
    parts = [part for d in found for part in (d.index, d.before, d.after)]
    arrays = iter(on_host([*parts, *meanwhile]))
    taken = [(next(arrays), next(arrays), next(arrays)) for _ in pairs]
    if any(flag.any() for flag in arrays):
        raise invalid(
            "the tensors changed while they were compared; change them once the push has returned, "
            "or source_free is done",
        )
    digests = _digests(kernels, pairs, words, found)
    return [
        _changes(base, tensor, parts, digests)
        for (base, tensor), parts in zip(pairs, taken, strict=True)
    ]


def _digests(
    kernels: Kernels | None,
    pairs: Sequence[tuple[DeviceTensor, SourceTensor]],
    words: Sequence[Pair],
    found: Sequence[ChangedElements],
) -> DeviceDigests | None:
    """Have the device digest what has changed; None: the host does."""
    if kernels is None:
        return None
    return DeviceDigests(
        kernels,
        {
            tensor.name: new.view(torch.uint8)
            for (_, tensor), (_, new), difference in zip(pairs, words, found, strict=True)
            if len(difference.index)
        },
    )


def _changes(
    base: DeviceTensor,
    tensor: SourceTensor,
    parts: tuple[NDArray[Any], NDArray[Any], NDArray[Any]],
    digests: DeviceDigests | None,
) -> Changes:
    index, before, after = parts
    unsigned = f"<u{element_width(base.dtype)}"

    def new_digest() -> bytes:
        if digests is not None and tensor.name in digests.names:
            return digests.of(tensor.name)
        return tensor.digest(own_scratch())

    return Changes(
        tensor.name,
        base.dtype,
        base.shape,
        index,
        before.view(unsigned),
        after.view(unsigned),
        new_digest=new_digest,
        same_digest=lambda: base.digest,
        all_bytes=lambda: all_bytes(tensor, own_scratch()),
    )
