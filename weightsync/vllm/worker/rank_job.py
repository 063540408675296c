"""The one thing that a rank does beside generation, and what it tells about its end."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weightsync.vllm.apply.transform import NeedsLoadError
from weightsync.vllm.plan.int_views import StoppedError
from weightsync.vllm.plan.load_plan import PlanRefusedError
from weightsync.vllm.plan.plan_cache import NeedsCaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["NAMES", "Job", "RefusedCallError", "caught", "refused"]

logger = logging.getLogger(__name__)

#: Offenders named in one report.
NAMES = 10


class RefusedCallError(Exception):
    """A call that this rank cannot follow; its text is one sentence."""


def _nobody(what: object) -> None:
    del what


@dataclass
class Job:
    """The one background thread.

    Attributes:
        apply_id: What it works on.
        gives_way: Whether the next job may end it, and what it works on then stays; see `unwanted`.
        stages: Whether it writes staging memory.
        prefetches: Whether it reads what still comes in; at last it looks at what is live.
        progress: Called with n when it will not read the first n shards of its version any
            more, in the order of `Layout.largest_first`.
        report: Called with what else is to be told while it runs.
        over: All is done but the telling: who is told may ask for the next one at once.
        follower: Goes on from what this one leaves, and waits for it.
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
    follower: Job | None = None

    @property
    def unwanted(self) -> bool:
        """Whether it was ended, and nobody goes on from what it would still find."""
        if not self.cancelled.is_set():
            return False
        # Named before this was cancelled, if there is one.
        follower = self.follower
        return follower is None or follower.cancelled.is_set()

    def running(self) -> bool:
        """Whether it has not ended."""
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
        return blank | {"phase": "failed", "error": "released by the server"}
    except Exception as error:
        logger.exception("weightsync: a background job failed")
        return blank | {"phase": "failed", "error": f"{type(error).__name__}: {error}"}
