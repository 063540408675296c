"""The one job that a rank does beside generation, in a thread that reports on a status page."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weightsync.shm.segment_socket import SegmentClient
from weightsync.shm.status_page import PageWriter
from weightsync.vllm.apply.parallel import taking_turns
from weightsync.vllm.apply.transform import NeedsLoadError
from weightsync.vllm.plan.int_views import StoppedError
from weightsync.vllm.plan.load_plan import PlanRefusedError
from weightsync.vllm.plan.plan_cache import NeedsCaptureError

logger = logging.getLogger(__name__)


#: Offenders named in one report.
NAMES = 10


class RefusedCallError(Exception):
    """A call that this rank cannot follow; its text is one sentence."""


def _nobody(what: object) -> None:
    del what


@dataclass
class RankJob:
    """The one background thread; it is `over` when all is done but the report.

    The next job may end one that `gives_way`, and what it works on then stays; see `unwanted`. It
    `stages` if it writes staging memory, and `prefetches` if it reads what still comes in.
    `progress` is called with n when it will not read the first n shards of its version any more, in
    the order of `Layout.largest_first`. `follower` goes on from what this one leaves, and waits for
    it.
    """

    apply_id: str
    gives_way: bool = False
    stages: bool = False
    prefetches: bool = False
    progress: Callable[[int], None] = _nobody
    report: Callable[[Mapping[str, Any]], None] = _nobody
    over: bool = False
    cancelled: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    follower: RankJob | None = None

    @property
    def unwanted(self) -> bool:
        """Whether it was ended, and nobody goes on from what it would still find."""
        if not self.cancelled.is_set():
            return False
        # Named before this was cancelled, if there is one.
        follower = self.follower
        return follower is None or follower.cancelled.is_set()

    def running(self) -> bool:
        return not self.over and self.thread is not None and self.thread.is_alive()

    def end(self) -> None:
        """Have it stop soon, and wait for that."""
        self.cancelled.set()
        if self.thread is not None:
            self.thread.join()


def refused(error: PlanRefusedError) -> dict[str, Any]:
    """Return what a report or a reply tells of a refusal: the first names, and how many."""
    offenders = {"names": error.names[:NAMES], "names_total": len(error.names)}
    return {"error": str(error), "refused": True, **offenders}


def caught(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run a job; whatever happens becomes a report."""
    blank: dict[str, Any] = {"error": "", "names": [], "proved": None, "mismatched": []}
    try:
        return blank | work()
    except NeedsCaptureError:
        return blank | {"phase": "needs_capture"}
    except NeedsLoadError:
        return blank | {"phase": "needs_load"}
    except PlanRefusedError as error:
        return blank | {"phase": "failed"} | refused(error)
    except StoppedError:
        return blank | {"phase": "failed", "error": _RELEASED}
    except Exception as error:
        logger.exception("weightsync: a background job failed")
        return blank | {"phase": "failed", "error": f"{type(error).__name__}: {error}"}


#: Why a job has failed that a call to release it has stopped.
_RELEASED = "the server gave this version up before the rank was done with it"

#: Does a job by the arguments of its call; returns its report.
Work = Callable[[RankJob, dict[str, Any]], dict[str, Any]]


class Background:
    """Does one job after the other. Calls come from one thread.

    A job's thread calls `enter` first, and `dropped` with its apply id if it was cancelled.
    `socket` returns where status pages are, by the arguments of a call.
    """

    def __init__(
        self,
        name: str,
        socket: Callable[[Mapping[str, Any]], str],
        enter: Callable[[], None],
        dropped: Callable[[str], None],
    ) -> None:
        self.job = RankJob("")
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
        """Start a job, ending one that gives way, or raise RefusedCallError if another is at work.

        One that reads ahead what the new one prepares still finishes what it is about to find. A
        job that prefetches always gives way.
        """
        before = self.job
        gives_way = prefetches or bool(args.get("gives_way"))
        job = RankJob(str(args["apply_id"]), gives_way, stages=stages, prefetches=prefetches)
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

    def _run(self, job: RankJob, before: RankJob, args: dict[str, Any], work: Work) -> None:
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
