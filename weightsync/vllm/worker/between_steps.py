"""A version that becomes live between two steps, without a pause: on all ranks, or on none.

It runs inside one worker call, and EngineCore's only thread waits for that call: no step runs
before every rank has returned from here, and none returns without knowing what all hold.

    all hold the base? -> commit + verify -> all hold the new one? return
                                          -> else restore + verify -> all hold the base? return
                                                                   -> else this process ends

vLLM ends an engine that has lost a worker, so that a mixture is never stepped on.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weightsync import failpoints
from weightsync.vllm.worker.consensus import NoConsensusError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from weightsync.vllm.worker.consensus import RankGroup
    from weightsync.vllm.worker.rank import Rank

__all__ = ["EXIT_STATUS", "end_process", "switch"]

logger = logging.getLogger(__name__)

#: With which a worker ends that must not take another step.
EXIT_STATUS = 70


@dataclass(frozen=True)
class _Order:
    """What the server asks for; every rank is told the same."""

    apply_id: str
    base_id: str
    limit_s: float
    call: str


def end_process() -> None:
    """End this process at once, whatever else it does."""
    os._exit(EXIT_STATUS)


def switch(
    rank: Rank,
    args: Mapping[str, Any],
    ranks: RankGroup,
    end: Callable[[], None] = end_process,
) -> dict[str, Any]:
    """Return with every rank on the new version, or every rank on the base, or not at all.

    The reply's `content_digest` is what this rank is proved to hold; `ok` tells whether that is the
    new version, and `error` why not.

    Args:
        rank: This rank.
        args: `apply_id`, `base_id`, `limit_s`: longest wait for the other ranks, and `call`.
        ranks: All ranks.
        end: Ends this process.
    """
    order = _Order(
        str(args["apply_id"]), str(args["base_id"]), float(args["limit_s"]), str(args["call"])
    )
    begin = time.perf_counter()
    try:
        reply = _switched(rank, order, ranks)
    except Exception as error:
        # Whatever it is: nobody knows what the ranks would take their next step on.
        logger.critical("weightsync: %s; this worker ends, restart vLLM", error)
        end()
        raise
    seconds = time.perf_counter() - begin
    outcome = {"content_digest": rank.proved, "switch_s": seconds}
    return reply | {"apply_id": order.apply_id, **outcome}


def _switched(rank: Rank, order: _Order, ranks: RankGroup) -> dict[str, Any]:
    def agree(stage: str, *, yes: bool) -> bool:
        return ranks.all_agree(f"{order.call} {stage}", order.limit_s, yes=yes)

    ready = rank.holds(order.base_id)
    if not agree("begin", yes=ready):
        why = "another rank cannot begin" if ready else "this rank does not hold the base"
        return {"ok": False, "error": f"{why}; nothing was written"}
    reply = _committed(rank, order.apply_id)
    if agree("switched", yes=rank.holds(order.apply_id)):
        return reply
    error = reply.get("error") or "another rank failed"
    logger.error("weightsync: the switch failed (%s), the base is put back", error)
    back = _restored(rank, order.base_id)
    if not agree("restored", yes=rank.holds(order.base_id)):
        text = back.get("error") or "another rank failed"
        msg = f"the base could not be put back ({text})"
        raise NoConsensusError(msg)
    return {**back, "ok": False, "error": error}


def _committed(rank: Rank, apply_id: str) -> dict[str, Any]:
    try:
        return rank.commit({"apply_id": apply_id})
    except Exception as error:
        logger.exception("weightsync: the commit of a switch failed")
        return {"ok": False, "error": f"{type(error).__name__}: {error}"}


def _restored(rank: Rank, base_id: str) -> dict[str, Any]:
    try:
        failpoints.hit("worker.restore")
    except OSError as error:
        return {"ok": False, "error": str(error)}
    # A rank that has not begun to write has nothing to put back.
    return {} if rank.holds(base_id) else _committed(rank, base_id)
