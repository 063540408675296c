"""Status pages on which this node's ranks report, passed on to the head as they change."""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING, Any

from weightsync import clock, failpoints
from weightsync.node.v1 import node_pb2 as pb
from weightsync.shm.status_page import PAGE_BYTES, PageReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync.shm.segment_socket import SegmentServer

__all__ = ["PageRelay"]

#: How often pages are looked at while ranks are at work, and otherwise; seconds.
_POLL_S, _IDLE_S = 0.002, 0.05
#: From the last change on for so long ranks count as at work, seconds.
_AT_WORK_S = 5.0


class PageRelay:
    """Publishes pages and passes on what is written there.

    Args:
        server: The segment socket.
        send: Takes a report for the head.
    """

    def __init__(self, server: SegmentServer, send: Callable[[pb.RankReport], None]) -> None:
        self._server = server
        self._send = send
        self._pages: dict[str, PageReader] = {}
        self._reports: dict[str, dict[str, Any]] = {}

    def publish(self, request: pb.PublishPages) -> None:
        """Let ranks find their pages; those before are withdrawn."""
        self.close()
        for rank in request.ranks:
            page = self._pages[f"{request.name}/{rank}"] = PageReader()
            self._server.publish(f"{request.name}/{rank}", os.dup(page.segment.fd), PAGE_BYTES)

    async def run(self) -> None:
        """Pass on what ranks write, for ever."""
        changed = 0.0
        while True:
            for name, page in list(self._pages.items()):
                if self._pages.get(name) is not page:
                    continue
                report = page.read()
                if report is not None and report != self._reports.get(name):
                    await failpoints.reach("node.report")
                    self._reports[name] = report
                    self._send(pb.RankReport(page=name, report_json=json.dumps(report).encode()))
                    changed = clock.monotonic()
            at_work = clock.monotonic() - changed < _AT_WORK_S
            await asyncio.sleep(_POLL_S if at_work else _IDLE_S)

    def close(self) -> None:
        """Withdraw the pages; what a rank still writes there is read by nobody."""
        for name, page in self._pages.items():
            self._server.withdraw(name)
            page.close()
        self._pages, self._reports = {}, {}
