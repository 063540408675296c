"""The status pages of an engine's ranks: one each, in this server's memory."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Any

from weightsync.shm.status_page import PAGE_BYTES, PageReader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightsync.shm.segment_socket import SegmentServer

__all__ = ["RankPages"]


class RankPages:
    """Published until `close`.

    Args:
        ranks: `dp/pp/tp` of each rank.
        segments: Publishes them.

    Attributes:
        name: What a rank finds its own under, with its name behind a slash.
    """

    def __init__(self, ranks: Sequence[str], segments: SegmentServer) -> None:
        self.name = f"page-{secrets.token_hex(8)}"
        self._segments = segments
        self._pages = {rank: PageReader() for rank in ranks}
        for rank, page in self._pages.items():
            segments.publish(f"{self.name}/{rank}", os.dup(page.segment.fd), PAGE_BYTES)

    def read(self) -> list[dict[str, Any] | None]:
        """Return what every rank has written last; None: nothing yet, or it is writing."""
        return [page.read() for page in self._pages.values()]

    def close(self) -> None:
        """Withdraw them."""
        for rank, page in self._pages.items():
            self._segments.withdraw(f"{self.name}/{rank}")
            page.close()
