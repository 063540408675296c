"""One node's server for as long as its call lasts: what it was asked for, and what is there."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.node.v1 import node_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["JoinedNode"]


class JoinedNode:
    """Asks one node's server for things by name, each once, and knows which are there.

    Args:
        rank: Which node it is, from 1.

    Attributes:
        left: Why it is no node any more; empty: it is one.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.left = ""
        self._requests: asyncio.Queue[pb.JoinResponse | None] = asyncio.Queue()
        self._asked: dict[str, asyncio.Future[None]] = {}
        self._versions: set[str] = set()
        self._page = ""
        self._reporting: frozenset[str] = frozenset()

    @property
    def versions(self) -> frozenset[str]:
        """Names of the staged versions that it was asked for and did not give back."""
        return frozenset(self._versions)

    async def requests(self) -> AsyncIterator[pb.JoinResponse]:
        """Yield what the node is asked for until it leaves."""
        while (request := await self._requests.get()) is not None:
            yield request

    async def have(self, name: str, request: pb.JoinResponse) -> None:
        """Return when the node has what is asked for; asks unless it was asked before.

        Args:
            name: That of the request.
            request: Sent to the node.

        Raises:
            WeightSyncError: The node cannot, or has left; it is asked again the next time.
        """
        if self.left:
            raise self.away()
        answer = self._asked.get(name)
        if answer is None:
            answer = self._asked[name] = asyncio.get_running_loop().create_future()
            # Whoever waited may be gone.
            answer.add_done_callback(_retrieve)
            self._note(name, request)
            self._requests.put_nowait(request)
        await asyncio.shield(answer)

    def _note(self, name: str, request: pb.JoinResponse) -> None:
        if request.HasField("stage"):
            self._versions.add(name)
        elif request.HasField("pages"):
            # Those before were of a session that is over.
            if self._page != name:
                self._asked.pop(self._page, None)
            self._page = name
            self._reporting = frozenset(f"{name}/{rank}" for rank in request.pages.ranks)

    def has(self, name: str) -> bool:
        """Tell whether the node has something that it was asked for."""
        answer = self._asked.get(name)
        return answer is not None and answer.done() and not self.left

    def reports_on(self, page: str) -> bool:
        """Tell whether a page is of one of its ranks."""
        return page in self._reporting

    def take(self, ready: pb.NodeReady) -> None:
        """Take note of what became of something that was asked for."""
        answer = self._asked.get(ready.name)
        if answer is None or answer.done():
            return
        if not ready.error:
            answer.set_result(None)
            return
        del self._asked[ready.name]
        reason = Reason(ready.reason) if ready.reason in Reason.__members__ else Reason.FAULT
        answer.set_exception(WeightSyncError(reason, f"node {self.rank}: {ready.error}"))

    def forget(self, name: str) -> None:
        """Let the node give a staged version back."""
        self._versions.discard(name)
        if self._asked.pop(name, None) is not None:
            self._requests.put_nowait(pb.JoinResponse(forget=pb.ForgetVersion(name=name)))

    def leave(self, why: str) -> None:
        """Be no node any more: whoever waits for it is told why."""
        if self.left:
            return
        self.left = why
        self._requests.put_nowait(None)
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(self.away())

    def away(self) -> WeightSyncError:
        """Return the refusal of what needs this node."""
        return WeightSyncError(
            Reason.SERVER_AWAY,
            f"the weightsync-server of node {self.rank} {self.left}; look at its log, and apply "
            "again when it is back",
            retry_after_s=1.0,
        )


def _retrieve(answer: asyncio.Future[None]) -> None:
    if not answer.cancelled():
        answer.exception()
