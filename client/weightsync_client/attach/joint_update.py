"""One transaction of several trainer processes, each of which has parts of the tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from weightsync_client.attach.tensor_kinds import TensorKind, kind_of
from weightsync_client.attach.trainer_group import TrainerGroup
from weightsync_client.attach.written_boxes import TrainerBox, WrittenBox, copy_boxes
from weightsync_client.source.sharded_tensors import ShardedTensor, is_sharded, local_parts

if TYPE_CHECKING:
    from weightsync_client.attach.in_place import InPlaceTransaction

__all__ = ["update_together"]


class Target(Protocol):
    """Live parameters of an engine; see `Attached`."""

    def check_complete(self, kinds: Mapping[str, TensorKind]) -> None:
        """Accept the dtypes and shapes of all tensors, by name."""

    def places(self, boxes: Iterable[TrainerBox]) -> list[WrittenBox]:
        """Return every place where a part of a box lies, on every rank, with that part."""

    def check_written(self, places: Iterable[WrittenBox]) -> None:
        """Accept places that hold, bit for bit, what was written into them."""

    def settle(self) -> None:
        """Wait until whatever is queued on GPUs is done."""


def update_together(
    target: Target,
    transaction: InPlaceTransaction,
    tensors: Mapping[str, Any],
    push: Callable[..., object],
    pushers: TrainerGroup | None,
) -> None:
    """Have the engine serve the tensors of which every process has parts; see `Attached.update`.

    Args:
        target: What is written.
        transaction: Of the first process; those of the others are never begun.
        tensors: What this process has.
        push: As `Client.push`.
        pushers: The same processes, for a thread that pushes; None: this one does.

    Raises:
        ClientError: The same in all processes.
    """
    processes = TrainerGroup()
    with processes.together():
        transaction.wait_for_before()
        parts = {name: _part(name, value, processes.number) for name, value in tensors.items()}
        kinds = {name: TensorKind(part.dtype, part.shape) for name, part in parts.items()}
        target.check_complete(kinds)
        places = target.places(
            TrainerBox(name, *box) for name, part in parts.items() for box in _own_boxes(part)
        )
    key = processes.led(transaction.begin)
    try:
        # Nobody renews the lease: one that hangs would keep the engine standing.
        with processes.together():
            try:
                copy_boxes(places)
                target.check_written(places)
            finally:
                # Also what is about to be taken back must not be written later.
                target.settle()
    except BaseException:
        if processes.leads:
            transaction.call.abort()
        raise
    version = processes.led(transaction.call.commit)
    options = {
        "version": version,
        "idempotency_key": key,
        "writers": processes.count,
        "writer": processes.number,
        "delta": "never",
    }
    transaction.follow(
        lambda: _push_together(pushers or processes, transaction, partial(push, tensors, **options))
    )


def _push_together(
    processes: TrainerGroup, transaction: InPlaceTransaction, push: Callable[[], object]
) -> None:
    renewed = transaction.call.renewed() if processes.leads else nullcontext()
    with renewed, processes.together():
        push()
    transaction.note(processes.led(transaction.finish))


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
