"""One transaction of several trainer processes, each of which has parts of the tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from torch import distributed

from weightsync.errors import Reason
from weightsync_client.attach.tensor_kinds import TensorKind, kind_of
from weightsync_client.attach.written_boxes import TrainerBox, WrittenBox, copy_boxes
from weightsync_client.errors import refuse
from weightsync_client.source.sharded_tensors import ShardedTensor, is_sharded, local_parts
from weightsync_client.source.trainer_ranks import RankGoneError, TrainerRanks

if TYPE_CHECKING:
    from weightsync_client.attach.in_place import InPlaceTransaction

__all__ = ["check_joined", "update_together"]


class Target(Protocol):
    """Live parameters of an engine; see `Attached`."""

    def check_complete(self, kinds: Mapping[str, TensorKind]) -> None:
        """Accept the dtypes and shapes of all tensors, by name."""

    def places(self, boxes: Iterable[TrainerBox]) -> list[WrittenBox]:
        """Return every place where a part of a box lies, on every rank, with that part."""

    def check_written(self, places: Iterable[WrittenBox]) -> None:
        """Accept places that hold, bit for bit, what was written into them."""

    def open_block(self, transaction: str) -> None:
        """Have the parameters writable, in the block of a transaction."""

    def close_block(self) -> None:
        """Have them readable only."""

    def settle(self) -> None:
        """Wait until whatever is queued on GPUs is done."""


def check_joined() -> None:
    """Accept a process of torch.distributed.

    Raises:
        ClientError: REQUEST_INVALID: it is none.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        raise refuse(
            Reason.REQUEST_INVALID,
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

    Args:
        target: What is written.
        transaction: Of rank 0; those of the others are never begun.
        tensors: What this process has.
        push: As `Client.push`.
        pushers: The same ranks, for a thread that pushes; None: this one does.

    Raises:
        ClientError: The same on all ranks.
        RuntimeError: A rank has failed otherwise, which has its own error.
    """
    with _explain_gone_rank():
        ranks = TrainerRanks()
        places = ranks.together(lambda: _places(target, transaction, tensors, ranks.number))
        try:
            key = ranks.broadcast(transaction.begin)
            # Nobody renews the lease: one that hangs would keep the engine standing.
            ranks.together(lambda: _write(target, places, key if ranks.number else ""))
            version = ranks.broadcast(transaction.call.commit)
        except BaseException:
            if ranks.number == 0:
                transaction.abort()
            raise
    options = {
        "version": version,
        "idempotency_key": key,
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
            f"{error}, and the version before is served; start the processes anew and attach again",
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
