"""One transaction of several trainer processes, each of which has parts of the tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import distributed

from weightsync.errors import Reason
from weightsync.model.tensor_bits import as_ints, wide
from weightsync_client.attach.live_tensors import TensorKind, kind_of
from weightsync_client.attach.transaction import InPlaceTransaction, Writable
from weightsync_client.errors import invalid, refuse
from weightsync_client.source.flat_parameters import RankGoneError, TrainerRanks
from weightsync_client.source.sharded_tensors import ShardedTensor, is_sharded, local_parts

#: Of what is compared at a time: casts, and copies from another GPU, need that much memory.
_PIECE_BYTES = 128 << 20


class TrainerBox(NamedTuple):
    """A part of a trainer's tensor; it begins at `offsets` in the whole one, in elements."""

    name: str
    offsets: Sequence[int]
    values: torch.Tensor


class WrittenBox(NamedTuple):
    """A part of a rank's memory, `live`, and the part of the trainer's tensor written there.

    `source` has the same shape, in any dtype, on any device.
    """

    name: str
    live: torch.Tensor
    source: torch.Tensor


def overlap(
    offsets: Sequence[int], lengths: Sequence[int], others: Sequence[int], sizes: Sequence[int]
) -> tuple[slice, ...] | None:
    """Return which part of a box lies in another one, or None if no part does.

    The box begins at `offsets` and extends for `lengths`, the other one at `others` for `sizes`,
    all in elements.
    """
    both = []
    for offset, length, other, size in zip(offsets, lengths, others, sizes, strict=True):
        begin, end = max(offset, other), min(offset + length, other + size)
        if begin >= end:
            return None
        both.append(slice(begin - offset, end - offset))
    return tuple(both)


def copy_boxes(boxes: Iterable[WrittenBox]) -> None:
    """Have live parameters hold what is written into them, cast to what they are."""
    with torch.no_grad():
        for _, live, source in boxes:
            live.copy_(_near(source, live))


def _near(source: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """Return the source where a kernel that writes live memory reaches both.

    Memory opened from another process is mapped for its own GPU alone, but PyTorch writes a cast,
    or what has gaps, from the GPU of the source.
    """
    return source.to(live.device) if source.is_cuda and live.is_cuda else source


def find_unequal(boxes: Iterable[WrittenBox]) -> list[str]:
    """Return the tensors that are not, bit for bit, the trainer's, cast to what is live.

    What came from another GPU is compared on that one, so that damage by the copy is found. Devices
    are waited for once, at the end.
    """
    flags: dict[torch.device, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    with torch.no_grad():
        for name, live, source in boxes:
            where = source.device if source.is_cuda else live.device
            for one, two in _pieces(live, source):
                cast = two.dtype is not one.dtype
                differs = _differ(one.to(where), two.to(one.dtype).to(where), cast=cast)
                flags[where].append((name, differs))
    found: dict[str, None] = {}
    for pairs in flags.values():
        answers = torch.stack([flag for _, flag in pairs]).tolist()
        found |= {name: None for (name, _), answer in zip(pairs, answers, strict=True) if answer}
    return list(found)


def _pieces(
    live: torch.Tensor, source: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if not live.ndim or live.nbytes <= _PIECE_BYTES:
        yield live, source
        return
    rows = max(1, _PIECE_BYTES * len(live) // live.nbytes)
    yield from zip(torch.split(live, rows), torch.split(source, rows), strict=True)


def _differ(one: torch.Tensor, two: torch.Tensor, *, cast: bool) -> torch.Tensor:
    """Return a truth value that lies where both lie; of -0, and NaN, as of all others."""
    left, right = (as_ints(one), as_ints(two)) if cast else wide(one, two)
    differing = left.ne(right)
    if cast:
        # Which NaN a cast makes is not the same in all of PyTorch's loops.
        differing &= ~(one.float().isnan() & two.float().isnan())
    return differing.any()


class Target(Writable, Protocol):
    """Live parameters of an engine; see `Attached`."""

    def check_complete(self, kinds: Mapping[str, TensorKind]) -> None:
        """Accept the dtypes and shapes of all tensors, by name."""

    def places(self, boxes: Iterable[TrainerBox]) -> list[WrittenBox]:
        """Return every place where a part of a box lies, on every rank, with that part."""

    def check_written(self, places: Iterable[WrittenBox]) -> None:
        """Accept places that hold, bit for bit, what was written into them."""


def check_joined() -> None:
    """Raise a ClientError (REQUEST_INVALID) unless torch.distributed is initialized."""
    if not (distributed.is_available() and distributed.is_initialized()):
        raise invalid(
            "parts of tensors are served by all processes of torch.distributed together; call "
            "init_process_group first, or give whole tensors",
        )


def update_together(
    target: Target,
    transaction: InPlaceTransaction,
    tensors: Mapping[str, Any],
    push: Callable[..., object],
    pushers: TrainerRanks | None,
) -> None:
    """Have the engine serve the tensors of which every process has parts; see `Attached.update`.

    `transaction` is that of rank 0; those of the others are never begun. `pushers` are the same
    ranks, for a thread that pushes; with None, this thread does.

    Raises:
        ClientError: The same on all ranks.
        RuntimeError: Another rank has failed with an error of its own.
    """
    with _explain_gone_rank():
        ranks = TrainerRanks()
        places = ranks.together(lambda: _places(target, transaction, tensors, ranks.number))
        try:
            key = ranks.broadcast(transaction.begin)
            # Nobody renews the lease: one that hangs would keep the engine standing.
            ranks.together(lambda: _write(target, places, key if ranks.number else ""))
            version, push_key = ranks.broadcast(lambda: _commit(transaction))
        except BaseException:
            if ranks.number == 0:
                transaction.abort()
            raise
    options = {
        "version": version,
        "idempotency_key": push_key,
        "writers": ranks.count,
        "writer": ranks.number,
        "delta": "never",
        "dtype": "keep",
    }
    pushes = partial(push, tensors, **options)
    transaction.follow(lambda: _push_together(pushers or ranks, transaction, pushes))


def _places(
    target: Target, transaction: InPlaceTransaction, tensors: Mapping[str, Any], number: int
) -> list[WrittenBox]:
    transaction.wait_for_before()
    parts = {name: _part(name, value, number) for name, value in tensors.items()}
    kinds = {name: TensorKind(part.dtype, part.shape) for name, part in parts.items()}
    target.check_complete(kinds)
    return target.places(
        TrainerBox(name, *box) for name, part in parts.items() for box in _own_boxes(part)
    )


def _write(target: Target, places: Iterable[WrittenBox], transaction: str) -> None:
    """Write in a block that is opened here, or was where the transaction began."""
    try:
        if transaction:
            target.open_block(transaction)
        copy_boxes(places)
        target.check_written(places)
    finally:
        # Also what is about to be taken back must not be written later.
        try:
            target.settle()
        finally:
            target.close_block()


def _commit(transaction: InPlaceTransaction) -> tuple[int, str]:
    """Have the engine generate on what was written; return its version and the key of its push."""
    return transaction.call.commit(), transaction.call.push_key


def _push_together(
    ranks: TrainerRanks, transaction: InPlaceTransaction, push: Callable[[], object]
) -> None:
    renewed = transaction.call.renewed() if ranks.number == 0 else nullcontext()
    with _explain_gone_rank():
        with renewed:
            ranks.together(push)
        transaction.note(ranks.broadcast(transaction.finish))


@contextmanager
def _explain_gone_rank() -> Iterator[None]:
    try:
        yield
    except RankGoneError as error:
        raise refuse(
            Reason.PUSH_ABORTED,
            f"{error}, and the previous version is served; restart the processes and attach again",
        ) from error


def _part(name: str, value: Any, number: int) -> ShardedTensor:
    if is_sharded(value):
        return local_parts(name, value)
    # All processes have it whole.
    whole = [((0,) * value.ndim, value)]
    dtype, shape = kind_of(name, value)
    return ShardedTensor(shape, dtype, whole, replica=number > 0)


def _own_boxes(part: ShardedTensor) -> Sequence[tuple[Sequence[int], Any]]:
    """Return the boxes that this process writes."""
    return () if part.replica else part.boxes
