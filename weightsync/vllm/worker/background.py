"""The thread of a rank beside generation: one job at a time, told of on a status page."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from weightsync.shm.segment_socket import SegmentClient
from weightsync.shm.status_page import PageWriter
from weightsync.vllm.apply.parallel import taking_turns
from weightsync.vllm.worker.rank_job import Job, RefusedCallError, caught

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Background", "Work"]

logger = logging.getLogger(__name__)

#: Does a job by the arguments of its call; returns its report.
Work = Callable[[Job, dict[str, Any]], dict[str, Any]]


class Background:
    """Does one job after the other. Calls come from one thread.

    Args:
        name: Of the rank, `dp/pp/tp`.
        socket: Where status pages are, by the arguments of a call.
        enter: What the thread of a job does first.
        dropped: Called with the apply id of a job that was cancelled, in its thread.

    Attributes:
        job: The one that was started last.
    """

    def __init__(
        self,
        name: str,
        socket: Callable[[Mapping[str, Any]], str],
        enter: Callable[[], None],
        dropped: Callable[[str], None],
    ) -> None:
        self.job = Job("")
        self._name = name
        self._socket = socket
        self._enter = enter
        self._dropped = dropped
        self._page: tuple[str, PageWriter] | None = None

    @property
    def busy(self) -> str:
        """Apply id of the job that runs, unless it reads ahead; "": none does."""
        return self.job.apply_id if self.job.running() and not self.job.prefetches else ""

    def settle(self) -> str:
        """End a job that reads ahead; return the apply id of what still runs; "": nothing."""
        if self.job.prefetches:
            self.job.cancelled.set()
        return self.job.apply_id if self.job.running() else ""

    def start(
        self, args: Mapping[str, Any], work: Work, *, stages: bool = False, prefetches: bool = False
    ) -> None:
        """Start a job, and end one that gives way.

        One that reads ahead what the new one prepares waits for no more of it, but ends what it is
        about to find.

        Args:
            args: Of the call.
            work: What it does.
            stages: See `Job`.
            prefetches: See `Job`; such a job always gives way.

        Raises:
            RefusedCallError: Another job is at work.
        """
        before = self.job
        gives_way = prefetches or bool(args.get("gives_way"))
        job = Job(str(args["apply_id"]), gives_way, stages=stages, prefetches=prefetches)
        if before.gives_way:
            if before.prefetches and args.get("ahead") == before.apply_id:
                before.follower = job
            before.cancelled.set()
        if before.running() and not before.cancelled.is_set():
            msg = f"apply {before.apply_id} is still at work on this rank; release it or wait"
            raise RefusedCallError(msg)
        job.thread = threading.Thread(
            target=self._run, args=(job, before, dict(args), work), name="weightsync", daemon=True
        )
        self.job = job
        job.thread.start()

    def _run(self, job: Job, before: Job, args: dict[str, Any], work: Work) -> None:
        if before.thread is not None:
            before.thread.join()
        self._enter()
        begin = time.perf_counter()
        try:
            page = self._open_page(self._socket(args), f"{args['page']}/{self._name}")
            known = {"apply_id": job.apply_id, "ticket": args.get("ticket")}
            job.report = lambda more: page.write({**known, "phase": "running", **more})
            job.progress = lambda read: job.report({"read": read})
            job.progress(0)
        except Exception:
            logger.exception("weightsync: no status page for apply %s", job.apply_id)
            return
        with taking_turns():
            report = caught(lambda: work(job, args))
        report |= {**known, "seconds": time.perf_counter() - begin}
        if job.cancelled.is_set() and not job.gives_way:
            self._dropped(job.apply_id)
        job.over = True
        try:
            page.write(report)
        except Exception:
            logger.exception("weightsync: no report for apply %s", job.apply_id)

    def _open_page(self, socket: str, page: str) -> PageWriter:
        if self._page is None or self._page[0] != page:
            with SegmentClient(socket) as client:
                ((fd, _),) = client.map([page])
            if self._page is not None:
                self._page[1].close()
            self._page = (page, PageWriter(fd))
        return self._page[1]
