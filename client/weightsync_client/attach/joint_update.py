"""One transaction of several trainer processes, each of which has parts of the tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import distributed

from weightsync.errors import Reason
from weightsync_client.attach.tensor_kinds import TensorKind, kind_of
from weightsync_client.attach.written_boxes import TrainerBox, WrittenBox, copy_boxes
from weightsync_client.errors import ClientError, refuse
from weightsync_client.source.sharded_tensors import ShardedTensor, is_sharded, local_parts

if TYPE_CHECKING:

    from weightsync_client.attach.in_place import InPlaceTransaction

__all__ = ["update_together"]

T = TypeVar("T")


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
) -> None:
    """Have the engine serve the tensors of which every process has parts; see `Attached.update`.

    Args:
        target: What is written.
        transaction: Of the first process; those of the others are never begun.
        tensors: What this process has.
        push: As `Client.push`.

    Raises:
        ClientError: The same in all processes.
    """
    processes = _TrainerGroup()
    with processes.together():
        parts = {name: _part(name, value, processes.number) for name, value in tensors.items()}
        kinds = {name: TensorKind(part.dtype, part.shape) for name, part in parts.items()}
        target.check_complete(kinds)
        places = target.places(
            TrainerBox(name, *box) for name, part in parts.items() for box in _written(part)
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
    renewed = transaction.call.renewed() if processes.leads else nullcontext()
    with renewed, processes.together():
        push(
            tensors,
            version=version,
            idempotency_key=key,
            writers=processes.count,
            writer=processes.number,
            delta="never",
        )
    transaction.note(processes.led(transaction.finish))


def _part(name: str, value: Any, number: int) -> ShardedTensor:
    if is_sharded(value):
        return local_parts(name, value)
    # All processes have it whole.
    whole = [((0,) * value.ndim, value)]
    dtype, shape = kind_of(name, value)
    return ShardedTensor(shape, dtype, whole, replica=number > 0)


def _written(part: ShardedTensor) -> Sequence[tuple[Sequence[int], Any]]:
    """Return the boxes that this process writes."""
    return () if part.replica else part.boxes


class _TrainerGroup:
    """The processes of torch.distributed, which all do the same; the first one leads.

    What fails in one of them fails in all.

    Attributes:
        count: How many there are.
        number: Which of them this is.
    """

    def __init__(self) -> None:
        self.count, self.number = 1, 0
        if distributed.is_available() and distributed.is_initialized():
            self.count, self.number = distributed.get_world_size(), distributed.get_rank()

    @property
    def leads(self) -> bool:
        """Whether this process is the first one."""
        return self.number == 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """Leave the block when all processes have; raise what failed in any of them.

        Raises:
            ClientError: Of the first process that has one.
        """
        error: BaseException | None = None
        try:
            yield
        except Exception as raised:  # noqa: BLE001 - all processes are told, then it is raised
            error = raised
        errors: list[tuple[Reason, str] | None] = [None] * self.count
        _tell(lambda: distributed.all_gather_object(errors, _facts(error)))
        if error is not None:
            raise error
        for number, other in enumerate(errors):
            if other is not None:
                reason, message = other
                raise refuse(reason, f"process {number} of {self.count}: {message}")

    def led(self, work: Callable[[], T]) -> T:
        """Return in every process what a piece of work of the first one returns.

        Raises:
            ClientError: It failed.
        """
        answer: list[Any] = [None, None]
        error: BaseException | None = None
        if self.leads:
            try:
                answer[0] = work()
            except Exception as raised:  # noqa: BLE001 - all processes are told, then it is raised
                error, answer[1] = raised, _facts(raised)
        _tell(lambda: distributed.broadcast_object_list(answer, src=0))
        if error is not None:
            raise error
        if answer[1] is not None:
            reason, message = answer[1]
            raise refuse(reason, message)
        result: T = answer[0]
        return result


def _tell(work: Callable[[], object]) -> None:
    try:
        work()
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        raise refuse(
            Reason.PUSH_ABORTED,
            f"a process of this update has gone ({first}), and the version before is served; "
            "start the processes anew and attach again",
        ) from error


def _facts(error: BaseException | None) -> tuple[Reason, str] | None:
    if error is None:
        return None
    if isinstance(error, ClientError):
        return error.reason, error.message
    return Reason.FAULT, f"{type(error).__name__}: {error}"
