"""Versions that the ranks of one engine load beside generation."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from weightsync_server.engine.rank_pages import RankPages
from weightsync_server.engine.worker_reports import RankLoad, read_load

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from weightsync.shm.segment_socket import SegmentServer

__all__ = ["RankLoads"]

#: Time for a call that only starts a thread, seconds.
_START_S = 30.0


class RankLoads:
    """Has ranks load versions, and reads how far they are.

    Args:
        names: `dp/pp/tp` of each rank, in the order of replies.
        segments: Publishes the status pages.
        call: Has every rank do something, within so many seconds, or raises what one refused.
    """

    def __init__(
        self,
        names: Sequence[str],
        segments: SegmentServer,
        call: Callable[[str, dict[str, Any], float], Awaitable[object]],
    ) -> None:
        self._names = names
        self._segments = segments
        self._call = call
        # Apart from those of what else a rank does meanwhile; None: no version was loaded yet.
        self._pages: RankPages | None = None

    def close(self) -> None:
        """Withdraw the pages."""
        if self._pages is not None:
            self._pages.close()

    async def start(self, group: str, document: str) -> str:
        """Let every rank load a version beside generation; returns the ticket for `read`.

        Args:
            group: Names the loaders of this engine, which start and end together.
            document: Segment that tells where the version lies.
        """
        ticket = secrets.token_hex(8)
        if self._pages is None:
            self._pages = RankPages(self._names, self._segments)
        args = {"group": group, "document": document, "page": self._pages.name}
        args |= {"apply_id": f"load-{ticket}", "ticket": ticket}
        await self._call("weightsync_load", args, _START_S)
        return ticket

    def read(self, ticket: str) -> list[RankLoad]:
        """Return how far every rank is with a load, or what it ended with."""
        if self._pages is None:
            return [RankLoad(rank) for rank in self._names]
        pages = zip(self._names, self._pages.read(), strict=True)
        return [read_load(rank, ticket, page) for rank, page in pages]
