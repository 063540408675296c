"""Which reply belongs to which call and which rank, and what all ranks agree on."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from weightsync import failpoints

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightsync.engine import SwitchOrder

__all__ = ["Pairing", "agreed", "served_after"]


class Pairing:
    """Names every worker call, so that no reply is taken for the answer to another one.

    vLLM itself pairs replies with calls by their order: after one that was left in its queues every
    later call reads the one before (vllm#49972).

    Args:
        ranks: `dp/pp/tp` in the order of replies.
    """

    def __init__(self, ranks: Sequence[str]) -> None:
        self._ranks = tuple(ranks)
        self._before: list[dict[str, Any]] = []

    def name(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call with a name that each rank repeats."""
        return {**args, "call": secrets.token_hex(8)}

    def own(self, replies: list[dict[str, Any]], args: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the replies; what is not this rank's answer to this call has become a failure."""
        replies = self._confused(replies)
        if len(replies) != len(self._ranks):
            return replies
        return [
            _own(reply, rank, str(args["call"]))
            for rank, reply in zip(self._ranks, replies, strict=True)
        ]

    def _confused(self, replies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if not failpoints.enabled():
            return replies
        before, self._before = self._before, replies
        lie = failpoints.lie("bridge.replies")
        return {"twice": replies * 2, "lost": [], "stale": before}.get(lie or "", replies)


def _own(reply: dict[str, Any], rank: str, call: str) -> dict[str, Any]:
    wrong = ""
    if reply.get("call") != call:
        wrong = "answered another call"
    elif reply.get("rank") != rank:
        wrong = f"answered as rank {reply.get('rank')!r}"
    return {"ok": False, "rank": rank, "error": wrong} if wrong else reply


def agreed(replies: Sequence[Mapping[str, Any]], count: int) -> str:
    """Return the one digest that all `count` ranks proved, or ""."""
    digests = {
        str(reply.get("content_digest", "")) if reply.get("ok") and not reply.get("dirty") else ""
        for reply in replies
    }
    return digests.pop() if len(digests) == 1 and len(replies) == count else ""


def served_after(replies: Sequence[Mapping[str, Any]], count: int, order: SwitchOrder) -> str:
    """Return the digest that all `count` ranks hold after a switch, or "" if they tell no one.

    That is the new one where every rank says so, the base where every rank says that it failed and
    is back on it.
    """
    if agreed(replies, count) == order.content_digest:
        return order.content_digest
    back = len(replies) == count and not any(reply.get("ok") for reply in replies)
    digests = {reply.get("content_digest") for reply in replies}
    return order.base_digest if back and digests == {order.base_digest} else ""
