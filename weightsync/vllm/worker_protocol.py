"""What the API process and the workers of an engine agree on: names of methods and of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: The methods on vLLM's workers, and what a rank calls each.
METHODS: Mapping[str, str] = {
    "weightsync_hello": "hello",
    "weightsync_capture": "capture",
    "weightsync_check": "check",
    "weightsync_ahead": "prefetch",
    "weightsync_load": "load",
    "weightsync_prepare": "prepare",
    "weightsync_commit": "commit",
    "weightsync_switch": "switch",
    "weightsync_verify": "verify",
    "weightsync_state": "state",
    "weightsync_release": "release",
    "weightsync_attach": "attach",
    "weightsync_unprove": "unprove",
    "weightsync_digest": "digest",
}

#: Our backends that receive over a transfer of vLLM's own, and what vLLM calls that.
RECEIVING_BACKENDS: Mapping[str, str] = {"weightsync_nccl": "nccl", "weightsync_ipc": "ipc"}


def rank_name(parallel: Any, rank: int) -> str:
    """Return `dp/pp/tp` of a worker from vLLM's ParallelConfig and its rank in the executor."""
    # Engine cores of a dense model are told a data parallel rank of 0, but keep their index.
    index = getattr(parallel, "data_parallel_index", None)
    return _name(parallel, parallel.data_parallel_rank if index is None else index, rank)


def rank_names(parallel: Any) -> tuple[str, ...]:
    """Return the names of all workers of one engine in the order of their replies.

    A worker of a dense model that knows only its own engine core gets the names of that one's
    workers.
    """
    size = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    cores = range(parallel.data_parallel_size)
    return tuple(_name(parallel, core, rank) for core in cores for rank in range(size))


def _name(parallel: Any, core: int, rank: int) -> str:
    tp_size = parallel.tensor_parallel_size
    return f"{core}/{rank // tp_size}/{rank % tp_size}"
