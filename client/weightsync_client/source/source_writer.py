"""Which of several processes that push one version this is, and how they find each other."""

from __future__ import annotations

import os
import sys
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason
from weightsync_client.errors import refuse
from weightsync_client.rpc.validate import text, whole_number

if TYPE_CHECKING:
    from weightsync_client.options import PushOptions

__all__ = ["SourceWriter", "own_rank", "source_writer"]

_RUN_ID = "weightsync/run_id"


@dataclass(frozen=True, slots=True)
class SourceWriter:
    """One of several processes that push a version together.

    Attributes:
        count: How many there are.
        number: Which of them this is, from 0.
        key: The idempotency key that all of them use.
    """

    count: int
    number: int
    key: str


def source_writer(options: PushOptions) -> SourceWriter:
    """Return which process this is: as the caller says, else as torch.distributed knows.

    Where that runs, the key is made of an id of this run of the job, on which its processes agree
    through their store, and the step.

    Raises:
        InvalidError: Neither says it.
    """
    process_group = _process_group()
    count, number = options.get("writers", 0), options.get("writer")
    if not count and process_group is not None:
        count, number = process_group.get_world_size(), process_group.get_rank()
    if not count or (count > 1 and number is None):
        raise refuse(
            Reason.REQUEST_INVALID,
            "the source holds parts of tensors, and torch.distributed does not run: say with "
            "writers=, writer= and idempotency_key= how many processes push, which of them this "
            "is, and a key that all of them use for this push alone",
        )
    count = whole_number("writers", count, 1)
    number = whole_number("writer", number or 0)
    if number >= count:
        raise refuse(Reason.REQUEST_INVALID, f"writer={number} of {count}; number them from 0")
    if count == 1:
        return SourceWriter(1, 0, options.get("idempotency_key") or "")
    return SourceWriter(count, number, _key(options, process_group))


def own_rank() -> int:
    """Return the rank of this process in torch.distributed; 0 where that does not run."""
    process_group = _process_group()
    return 0 if process_group is None else int(process_group.get_rank())


def _key(options: PushOptions, process_group: Any) -> str:
    if key := options.get("idempotency_key"):
        return text("idempotency_key", key)
    if process_group is None or "step" not in options:
        raise refuse(
            Reason.REQUEST_INVALID,
            "processes that push one version together need a key: give step=, the step of the "
            "training, where torch.distributed runs, else idempotency_key=, the same in all of "
            "them and another one for each push",
        )
    return f"{_run_id(process_group)}/{whole_number('step', options['step'])}"


def _process_group() -> Any:
    # Not imported: who uses it has.
    module: Any = sys.modules.get("torch.distributed")
    running = module is not None and module.is_available() and module.is_initialized()
    return module if running else None


def _run_id(process_group: Any) -> str:
    store = process_group.distributed_c10d._get_default_store()  # noqa: SLF001 - PyTorch has no public way to it
    # An agent's store outlives the processes that it starts again.
    name = f"{_RUN_ID}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    agreed = store.compare_set(name, "", uuid.uuid4().hex)
    return agreed.decode() if isinstance(agreed, bytes) else str(agreed)
