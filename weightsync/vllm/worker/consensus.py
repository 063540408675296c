"""What the tensor-parallel ranks of one engine agree on, over vLLM's own CPU group.

An all-reduce with a time limit: a monitored barrier would tell who is missing, but it carries no
vote and goes through rank 0 one after the other.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch
from torch import distributed

from weightsync import failpoints

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Alone", "GlooRankGroup", "NoConsensusError", "RankGroup", "tensor_rank_group"]


class NoConsensusError(Exception):
    """Nobody knows what the other ranks have said; its text is one sentence."""


class RankGroup(Protocol):
    """The ranks that take a step together."""

    def all_agree(self, question: str, limit_s: float, *, yes: bool) -> bool:
        """Return whether every rank says yes to the same question.

        Args:
            question: The same on every rank.
            limit_s: Longest wait for the others, seconds.
            yes: What this rank says.

        Raises:
            NoConsensusError: A rank is dead or late, or was asked something else.
        """
        ...


class Alone:
    """One rank agrees with itself."""

    def all_agree(self, question: str, limit_s: float, *, yes: bool) -> bool:
        """Return what this rank says."""
        del question, limit_s
        return _said(yes)


class GlooRankGroup:
    """The ranks of a gloo group. After a NoConsensusError the group cannot be used any more.

    Args:
        group: Every rank is in it; nobody else uses it during a call.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def all_agree(self, question: str, limit_s: float, *, yes: bool) -> bool:
        """Return whether every rank says yes to the same question."""
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
            msg = "the ranks were asked different questions"
            raise NoConsensusError(msg)
        return bool(agreed)


def _said(yes: bool) -> bool:  # noqa: FBT001 - the one thing it is about
    failpoints.hit("worker.vote")
    return yes and failpoints.lie("worker.opinion") != "no"


def tensor_rank_group() -> RankGroup:
    """Return the tensor-parallel ranks of the vLLM worker that this process is."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    return Alone() if group.world_size == 1 else GlooRankGroup(group.cpu_group)
