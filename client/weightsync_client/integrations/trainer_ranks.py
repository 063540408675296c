"""Ranks of a sharded trainer that act together: all of them succeed, or all raise the same error.

A rank that raised alone would leave the others in the next collective of the training.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from weightsync_client.errors import ClientError
from weightsync_client.source.flat_parameters import has_flat_parameters
from weightsync_client.source.sharded_tensors import is_sharded

__all__ = ["TrainerRanks", "holds_parts"]

T = TypeVar("T")


def holds_parts(model: Any) -> bool:
    """Whether a rank has parts of a model, as with FSDP, ZeRO-3 or tensor parallel, and not all."""
    if has_flat_parameters(model) or any(map(is_sharded, model.parameters())):
        return True
    # Between a forward pass and the next backward, FSDP2 may show whole parameters.
    fsdp2 = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return any(isinstance(module, fsdp2) for module in model.modules())


class TrainerRanks:
    """All ranks of torch.distributed; each calls the same methods in the same order.

    To make one is such a call.
    """

    def __init__(self) -> None:
        import torch.distributed

        self._distributed: Any = torch.distributed
        self._rank: int = self._distributed.get_rank()
        self._name: str = self.agree(uuid.uuid4().hex)
        self._keys = 0

    def agree(self, value: T) -> T:
        """Return the value of rank 0; a small one that can be pickled."""
        values = [value]
        self._distributed.broadcast_object_list(values, src=0)
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
        return self.together(first if self._rank == 0 else lambda: None)

    def _settle(self, own: Exception | None) -> None:
        """Raise on all ranks, if one of them has an error."""
        mine = (
            own if own is None or isinstance(own, ClientError) else f"{type(own).__name__}: {own}"
        )
        all_errors: list[Any] = [None] * self._distributed.get_world_size()
        self._distributed.all_gather_object(all_errors, mine)
        errors = {rank: error for rank, error in enumerate(all_errors) if error is not None}
        crashed = next((rank for rank, error in errors.items() if isinstance(error, str)), None)
        if crashed is not None:
            # A fault of the program; an adapter that logs errors must end on all ranks, too.
            if own is not None and isinstance(mine, str):
                raise own
            raise RuntimeError(f"rank {crashed} of the trainer failed: {errors[crashed]}")
        if errors:
            raise _first_of(errors)


def _first_of(errors: dict[int, ClientError]) -> ClientError:
    (_, first), *others = errors.items()
    for rank, error in others:
        if error.message != first.message:
            first.add_note(f"rank {rank}: {error.message}")
    return first
