"""Which job a process that attaches belongs to: all processes of a job write an engine together."""

from __future__ import annotations

import os
import uuid

from torch import distributed

__all__ = ["trainer_job"]

_KEY = "weightsync/job"

#: The process that has a name, and that.
_own: tuple[int, str] = (0, "")


def trainer_job() -> str:
    """Return the name of this process's job; processes of one torch.distributed have the same."""
    if distributed.is_available() and distributed.is_initialized():
        # Not a collective: processes attach when they like.
        store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - all have it
        if store.add(f"{_KEY}/asked", 1) == 1:
            store.set(_KEY, uuid.uuid4().hex)
        return bytes(store.get(_KEY)).decode()
    global _own  # noqa: PLW0603 - as long as the process
    if _own[0] != os.getpid():
        _own = os.getpid(), uuid.uuid4().hex
    return _own[1]
