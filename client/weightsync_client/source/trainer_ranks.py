"""Ranks of a sharded trainer that act together: all of them succeed, or all raise the same error.

A rank that raised alone would leave the others in the next collective of the training.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from weightsync_client.errors import ClientError
from weightsync_client.source.flat_parameters import has_flat_parameters
from weightsync_client.source.sharded_tensors import is_sharded

__all__ = ["RankGoneError", "TrainerRanks", "holds_parts"]

T = TypeVar("T")


def holds_parts(model: Any) -> bool:
    """Whether a rank has parts of a model, as with FSDP, ZeRO-3 or tensor parallel, and not all."""
    if has_flat_parameters(model) or any(map(is_sharded, model.parameters())):
        return True
    # Between a forward pass and the next backward, FSDP2 may show whole parameters.
    fsdp2 = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return any(isinstance(module, fsdp2) for module in model.modules())


class RankGoneError(RuntimeError):
    """A rank does not talk to the others any more."""


class TrainerRanks:
    """All ranks of torch.distributed; each calls the same methods in the same order.

    To make one is such a call. Where one has gone, what it says to the others raises
    `RankGoneError`.

    Args:
        group: By which they talk; None: the default one.

    Attributes:
        count: How many there are.
        number: Which of them this is.
    """

    def __init__(self, group: Any = None) -> None:
        import torch.distributed

        self._distributed: Any = torch.distributed
        self._group = group
        self.count: int = self._distributed.get_world_size()
        self.number: int = self._distributed.get_rank()
        self._name: str = self.agree(uuid.uuid4().hex)
        self._keys = 0

    def for_a_thread(self) -> TrainerRanks:
        """Return the same ranks, for another thread of each; end them with `close`.

        What two threads say by one group would be mixed up.
        """
        return TrainerRanks(self._distributed.new_group(backend="gloo"))

    def close(self) -> None:
        """End the group of `for_a_thread`."""
        # Whoever ends torch.distributed has ended it before.
        if self._group is not None and self._distributed.is_initialized():
            self._distributed.destroy_process_group(self._group)

    def agree(self, value: T) -> T:
        """Return the value of rank 0; a small one that can be pickled."""
        values = [value]
        with _name_gone_rank():
            self._distributed.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def next_key(self) -> str:
        """Return a key that all ranks get, and that none gets again."""
        self._keys += 1
        return f"{self._name}/{self._keys}"

    def together(self, call: Callable[[], T]) -> T:
        """Call it on every rank, and return when all have.

        Raises:
            ClientError: Of the lowest rank that has one; notes have those of others that differ.
            Exception: Its own, if it is none of the client's.
            RuntimeError: Such a one of another rank.
        """
        try:
            result = call()
        except Exception as error:
            self._settle(error)
            raise
        self._settle(None)
        return result

    def on_first(self, call: Callable[[], T]) -> T | None:
        """Call it on rank 0 alone, and return its result there; others return None when it has.

        Raises:
            ClientError: Of rank 0, on all.
            Exception: As of `together`.
        """
        first: Callable[[], T | None] = call
        return self.together(first if self.number == 0 else lambda: None)

    def broadcast(self, call: Callable[[], T]) -> T:
        """Call it on rank 0 alone, and return its result, which can be pickled, on all.

        Raises:
            ClientError: Of rank 0, on all.
            Exception: As of `together`.
        """
        return cast("T", self.agree(self.on_first(call)))

    def _settle(self, own: Exception | None) -> None:
        """Raise on all ranks, if one of them has an error."""
        mine = (
            own if own is None or isinstance(own, ClientError) else f"{type(own).__name__}: {own}"
        )
        all_errors: list[Any] = [None] * self.count
        with _name_gone_rank():
            self._distributed.all_gather_object(all_errors, mine, group=self._group)
        errors = {rank: error for rank, error in enumerate(all_errors) if error is not None}
        crashed = next((rank for rank, error in errors.items() if isinstance(error, str)), None)
        if crashed is not None:
            # A fault of the program; an adapter that logs errors must end on all ranks, too.
            if own is not None and isinstance(mine, str):
                raise own
            raise RuntimeError(f"rank {crashed} of the trainer failed: {errors[crashed]}")
        if errors:
            raise _first_of(errors)


@contextmanager
def _name_gone_rank() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        msg = f"a rank of the trainer has gone ({first})"
        raise RankGoneError(msg) from error


def _first_of(errors: dict[int, ClientError]) -> ClientError:
    (_, first), *others = errors.items()
    for rank, error in others:
        if error.message != first.message:
            first.add_note(f"rank {rank}: {error.message}")
    return first
