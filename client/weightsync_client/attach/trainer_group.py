"""The processes of a trainer, which do the same together; what fails in one fails in all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import distributed

from weightsync.errors import Reason
from weightsync_client.errors import ClientError, refuse

__all__ = ["TrainerGroup"]

T = TypeVar("T")


class TrainerGroup:
    """The processes of torch.distributed, of which the first one leads.

    Args:
        group: By which they talk; None: the default one.

    Attributes:
        count: How many there are.
        number: Which of them this is.
    """

    def __init__(self, group: distributed.ProcessGroup | None = None) -> None:
        self.count, self.number = 1, 0
        if distributed.is_available() and distributed.is_initialized():
            self.count, self.number = distributed.get_world_size(), distributed.get_rank()
        self._group = group

    @property
    def leads(self) -> bool:
        """Whether this process is the first one."""
        return self.number == 0

    def new_group(self) -> TrainerGroup:
        """Return the same processes for another thread of each; all of them call this at once.

        What two threads say by one group would be mixed up.
        """
        return TrainerGroup(distributed.new_group(backend="gloo"))

    def close(self) -> None:
        """End a group that `new_group` has made."""
        # Whoever ends torch.distributed has ended it before.
        if self._group is not None and distributed.is_initialized():
            distributed.destroy_process_group(self._group)

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
        _tell(lambda: distributed.all_gather_object(errors, _facts(error), group=self._group))
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
        _tell(lambda: distributed.broadcast_object_list(answer, src=0, group=self._group))
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
