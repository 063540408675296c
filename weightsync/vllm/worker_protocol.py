"""What the API process and the workers of an engine agree on: names of methods and of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["METHODS", "rank_name", "rank_names"]

#: The methods on vLLM's workers, and what a rank calls each.
METHODS: Mapping[str, str] = {
    "weightsync_hello": "hello",
    "weightsync_capture": "capture",
    "weightsync_check": "check",
    "weightsync_ahead": "prefetch",
    "weightsync_prepare": "prepare",
    "weightsync_commit": "commit",
    "weightsync_switch": "switch",
    "weightsync_verify": "verify",
    "weightsync_state": "state",
    "weightsync_release": "release",
}


def rank_name(parallel: Any, rank: int) -> str:
    """Return `dp/pp/tp` of a worker from vLLM's ParallelConfig and its rank in the executor."""
    dp = getattr(parallel, "data_parallel_index", None)
    if dp is None:
        dp = parallel.data_parallel_rank
    tp_size = parallel.tensor_parallel_size
    return f"{dp}/{rank // tp_size}/{rank % tp_size}"


def rank_names(parallel: Any) -> tuple[str, ...]:
    """Return the names of all workers of one engine in the order of `collective_rpc` replies."""
    size = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    return tuple(rank_name(parallel, rank) for rank in range(size))
