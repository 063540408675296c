"""A version that becomes live between two steps, without a pause: on all ranks, or on none.

It runs inside one worker call, and EngineCore's only thread waits for that call: no step runs
before every rank has returned from here, and none returns without knowing what all hold.

    all hold the base? -> commit + verify -> all hold the new one? return
                                          -> else restore + verify -> all hold the base? return
                                                                   -> else this process ends

vLLM ends an engine that has lost a worker, so that a mixture is never stepped on. A monitored
barrier would tell who is missing, but it carries no vote.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import distributed

from weightsync import failpoints

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from weightsync.vllm.worker.rank import Rank


logger = logging.getLogger(__name__)


class NoConsensusError(Exception):
    """Nobody knows what the other ranks have said; its text is one sentence."""


class RankGroup(Protocol):
    def all_agree(self, question: str, limit_s: float, *, yes: bool) -> bool:
        """Whether every rank says `yes` to the same question, waiting at most `limit_s`.

        Raises NoConsensusError if a rank is dead or late, or was asked something else.
        """


class SingleRankGroup:
    def all_agree(self, question: str, limit_s: float, *, yes: bool) -> bool:
        del question, limit_s
        return _said(yes)


class GlooRankGroup:
    """The ranks of a gloo group; after a NoConsensusError it cannot be used any more.

    Every rank is in `group`, which nothing else may use during a call.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def all_agree(self, question: str, limit_s: float, *, yes: bool) -> bool:
        asked = int.from_bytes(hashlib.blake2b(question.encode(), digest_size=7).digest())
        # The least of each: all say yes, and the largest question is the least one.
        votes = torch.tensor([int(_said(yes)), asked, -asked], dtype=torch.int64)
        try:
            work = distributed.all_reduce(
                votes, distributed.ReduceOp.MIN, group=self._group, async_op=True
            )
            assert work is not None  # noqa: S101 - this process is in the group
            # The group's own limit is half an hour; a wait with one of its own raises as well.
            work.wait(timedelta(seconds=limit_s))
        except RuntimeError as error:
            text = str(error).splitlines()[0][:200]
            msg = f"the ranks did not agree within {limit_s:g} s ({text})"
            raise NoConsensusError(msg) from error
        agreed, least, most = votes.tolist()
        if least != asked or -most != asked:
            raise NoConsensusError("the ranks were asked different questions")
        return bool(agreed)


def _said(yes: bool) -> bool:  # noqa: FBT001 - the one thing it is about
    failpoints.hit("worker.vote")
    return yes and failpoints.lie("worker.opinion") != "no"


def tensor_rank_group() -> RankGroup:
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    return SingleRankGroup() if group.world_size == 1 else GlooRankGroup(group.cpu_group)


#: With which a worker ends that must not take another step.
EXIT_STATUS = 70


def end_process() -> None:
    os._exit(EXIT_STATUS)


def switch(
    rank: Rank,
    args: Mapping[str, Any],
    ranks: RankGroup,
    end: Callable[[], None] = end_process,
) -> dict[str, Any]:
    """Return with every rank on the new version, or every rank on the base, or not at all.

    The reply's `content_digest` is what this rank is proved to hold; `ok` tells whether that is the
    new version, and `error` why not. `limit_s` is the longest wait for the other ranks.
    """
    apply_id, base_id = str(args["apply_id"]), str(args["base_id"])
    limit_s, call = float(args["limit_s"]), str(args["call"])

    def agree(stage: str, *, yes: bool) -> bool:
        return ranks.all_agree(f"{call} {stage}", limit_s, yes=yes)

    begin = time.perf_counter()
    try:
        reply = _switched(rank, apply_id, base_id, agree)
    except Exception as error:
        # Whatever it is: nobody knows what the ranks would take their next step on.
        logger.critical("weightsync: %s; this worker ends, restart vLLM", error)
        end()
        raise
    seconds = time.perf_counter() - begin
    outcome = {"content_digest": rank.proved, "switch_s": seconds}
    return reply | {"apply_id": apply_id, **outcome}


def _switched(
    rank: Rank, apply_id: str, base_id: str, agree: Callable[..., bool]
) -> dict[str, Any]:
    ready = rank.holds(base_id)
    if not agree("begin", yes=ready):
        why = "another rank cannot begin" if ready else "this rank does not hold the base"
        return {"ok": False, "error": f"{why}; nothing was written"}
    reply = _committed(rank, apply_id)
    if agree("switched", yes=rank.holds(apply_id)):
        return reply
    error = reply.get("error") or "another rank failed"
    logger.error("weightsync: the switch failed (%s), the base is being restored", error)
    back = _restored(rank, base_id)
    if not agree("restored", yes=rank.holds(base_id)):
        text = back.get("error") or "another rank failed"
        raise NoConsensusError(f"the base could not be restored ({text})")
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
