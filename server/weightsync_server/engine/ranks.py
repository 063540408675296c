"""The ranks of one engine: our worker methods, called over the executor's queues.

A worker RPC blocks EngineCore's only thread, so everything long runs in a thread of the worker and
reports on a status page; and an RPC is never cancelled, because its late replies would be read by
the next one.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.engine.rank_loads import RankLoads
from weightsync_server.engine.rank_pages import RankPages
from weightsync_server.engine.refusals import refusal
from weightsync_server.engine.worker_reports import (
    read_commit,
    read_common,
    read_names,
    read_no_plan,
    read_report,
    read_state,
    shards_read,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from weightsync.engine import Engine, SwitchOrder
    from weightsync.shm.segment_socket import SegmentServer
    from weightsync_server.engine.worker_reports import NoPlan, RankCommit, RankState, Report
    from weightsync_server.nodes import EngineNodes

__all__ = ["QUICK_S", "Ranks"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Time for a worker RPC that only starts a thread or reads a field, seconds.
QUICK_S = 30.0
#: How often a page in our own memory is looked at, seconds.
_POLL_S = 0.002
#: Calls that leave the live parameters and the engine as they are, however late they return.
_HARMLESS = frozenset(
    f"weightsync_{word}"
    for word in ("state", "check", "prepare", "ahead", "verify", "attach", "release")
)
#: What to do when nothing was written yet. Who commits or switches tells more: it fences.
_STUCK = (
    "; vLLM may be stopped or overloaded: look at its log, and call again when GetStatus tells "
    "SERVING"
)


class Ranks:
    """Calls worker methods on every rank and reads their status pages.

    Args:
        engine: The engine.
        names: `dp/pp/tp` of each rank, in the order of replies.
        segments: Publishes the status pages.
        nodes: Stage for the ranks that are not on this host; None: all are.

    Attributes:
        names: As given.
        loads: What they load beside generation.
    """

    def __init__(
        self,
        engine: Engine,
        names: Sequence[str],
        segments: SegmentServer,
        nodes: EngineNodes | None = None,
    ) -> None:
        self.names = tuple(names)
        self._engine = engine
        self._pages = RankPages(self.names, segments)
        self._segments = segments
        self._nodes = nodes
        self._changes = nodes.changes if nodes is not None else 0
        self.loads = RankLoads(self.names, segments, partial(self._done, remedy=_STUCK))
        self._outstanding: asyncio.Task[Any] | None = None
        self._asking = ""

    @property
    def hung(self) -> bool:
        """Whether an RPC that was given up has not returned yet."""
        return self._outstanding is not None and not self._outstanding.done()

    @property
    def may_write(self) -> bool:
        """Whether it hangs in a call after which nobody knows what the ranks hold."""
        return self.hung and self._asking not in _HARMLESS

    def close(self) -> None:
        """Withdraw the pages."""
        self._pages.close()
        self.loads.close()

    async def states(self, timeout_s: float) -> list[RankState]:
        """Ask what every rank holds."""
        replies = await self._call("weightsync_state", {}, timeout_s)
        return [read_state(rank, reply) for rank, reply in zip(self.names, replies, strict=True)]

    async def stage(self, document: str, content_digest: str, timeout_s: float) -> None:
        """Return when every node of the engine has what a call in a pause will read.

        Args:
            document: Of the version.
            content_digest: Of the version; "": what its document tells.
            timeout_s: Longest wait, seconds.

        Raises:
            WeightSyncError: As `EngineNodes.have`.
        """
        if self._nodes is not None:
            args = {"document": document, "content_digest": content_digest}
            await self._nodes.have(args, timeout_s)

    async def capture(self, document: str, timeout_s: float) -> tuple[str, NoPlan | None]:
        """Build the load plan for a layout; the engine must be paused, and `stage` be done before.

        Returns the names of the tensors that no rank loads, for `prepare`, and why versions must be
        loaded, because a rank has no plan of the engine's checkpoint; None: each has one.

        Raises:
            WeightSyncError: ENGINE_REFUSED with the rank's reason. SERVER_AWAY: a node has lost
                what it had staged, and the pause does not wait for it.
        """
        if self._nodes is not None:
            self._nodes.check_staged(document)
        args = {"document": document}
        replies = await self._done("weightsync_capture", args, timeout_s, _STUCK)
        why = read_no_plan(replies)
        return ("", why) if why else (read_common(replies, "ignored"), None)

    async def check(self, document: str, *, whole: bool = False) -> str:
        """Ask whether the model takes the tensors of a document, in whatever state the engine is.

        Returns the names, as `name_sets` packs them, of those that no rank has a place for.

        Raises:
            WeightSyncError: ENGINE_REFUSED, naming those that a rank does not take, or (`whole`:
                it has all tensors of a version) those that it needs besides.
        """
        args = {"document": document} | ({"whole": True} if whole else {})
        return read_common(await self._done("weightsync_check", args, QUICK_S, _STUCK), "unplaced")

    async def prepare(
        self,
        apply_id: str,
        document: str,
        *,
        compare_live: bool,
        timeout_s: float,
        proof_only: bool = False,
        base: str = "",
        prefetched: str = "",
        unloaded: str = "",
        content_digest: str = "",
        on_read: Callable[[int], None] | None = None,
    ) -> list[Report]:
        """Map, match and digest a staged version on every rank while generation runs.

        Args:
            apply_id: Its name in later calls.
            document: Segment that tells where it lies.
            compare_live: Whether the live parameters are compared with it.
            timeout_s: Longest wait, seconds.
            proof_only: Whether ranks that hold it do not claim that: it is no version.
            base: Apply id of what is live: where little differs from it, only that is prepared.
            prefetched: What the version was called when it was read while it came in.
            unloaded: From the capture of its layout; "": there was none.
            content_digest: Of the version, which every rank must find; "": not told.
            on_read: Called with n, time and again, when no rank reads the first n shards any more,
                in the order of `Layout.largest_first`.
        """
        args = {
            "apply_id": apply_id,
            "document": document,
            "page": self._page(),
            "compare_live": compare_live,
            "proof_only": proof_only,
            "base": base,
            "ahead": prefetched,
            "unloaded": unloaded,
            "content_digest": content_digest,
        }
        return await self._report("weightsync_prepare", args, timeout_s, on_read)

    async def verify(self, apply_id: str, timeout_s: float) -> list[Report]:
        """Compare live parameters with a prepared version while generation runs."""
        # Should it take too long, whatever comes next ends it.
        args = {"apply_id": apply_id, "page": self._page(), "gives_way": True}
        return await self._report("weightsync_verify", args, timeout_s)

    async def start_check(self, apply_id: str) -> str:
        """Let every rank begin to compare as `verify` does; whatever they are asked next ends it.

        Returns the ticket for `reports`.
        """
        args = {"apply_id": apply_id, "page": self._page(), "gives_way": True}
        return await self._start("weightsync_verify", args, QUICK_S)

    async def attach(
        self, apply_id: str, request: Mapping[str, Any], timeout_s: float
    ) -> list[Report]:
        """Have every rank hand out its memory, or remember to whom it is handed out.

        Args:
            apply_id: Of what is live.
            request: What is wanted; see `attachable`.
            timeout_s: Longest wait, seconds.
        """
        args = {"apply_id": apply_id, "page": self._page(), "gives_way": True, **request}
        return await self._report("weightsync_attach", args, timeout_s)

    async def unprove(self, timeout_s: float) -> None:
        """Have every rank take what is live for nothing proved: somebody else writes it now.

        The engine must be paused.

        Raises:
            WeightSyncError: ENGINE_AWAY: a rank did not, with its reason.
        """
        await self._done("weightsync_unprove", {}, timeout_s)

    async def digest(self, apply_id: str, name: str, timeout_s: float) -> list[RankCommit]:
        """Have every rank take what somebody else has written for whole; the engine is paused.

        Args:
            apply_id: Of a version that they have prepared.
            name: What they call it, in place of a content digest.
            timeout_s: Longest wait, seconds.
        """
        args = {"apply_id": apply_id, "name": name, "parts": len(self.names) > 1}
        replies = await self._call("weightsync_digest", args, timeout_s)
        return [read_commit(rank, apply_id, r) for rank, r in zip(self.names, replies, strict=True)]

    async def start_prefetch(self, apply_id: str, document: str) -> None:
        """Let every rank read shards of a version as they come; what they are asked next ends it.

        A prepare that names it waits for what all of it was just being found to change.

        Args:
            apply_id: What `prepare` names to have the rest read.
            document: Segment that tells what has come.
        """
        args = {
            "apply_id": apply_id,
            "document": document,
            "page": self._page(),
        }
        await self._start("weightsync_ahead", args, QUICK_S)

    async def commit(self, apply_id: str, version: int, timeout_s: float) -> list[RankCommit]:
        """Write and prove the parameters; the engine must be paused."""
        args = {"apply_id": apply_id, "version": version}
        replies = await self._call("weightsync_commit", args, timeout_s)
        return [read_commit(rank, apply_id, r) for rank, r in zip(self.names, replies, strict=True)]

    async def switch(self, order: SwitchOrder, timeout_s: float) -> tuple[list[RankCommit], str]:
        """Change the version between two steps; tells what the engine goes on with, "": nothing."""
        outcome = await self._asked(lambda: self._engine.switch(order), "a switch", timeout_s)
        replies = self._paired(outcome.replies, "a switch")
        ranks = zip(self.names, replies, strict=True)
        return [read_commit(rank, order.apply_id, reply) for rank, reply in ranks], outcome.serves

    async def release(self, keep: Iterable[str], timeout_s: float) -> None:
        """Let every rank drop what it prepared, but for the named applies; all stays mapped.

        Args:
            keep: Apply ids.
            timeout_s: Longest wait, seconds.

        Raises:
            WeightSyncError: ENGINE_AWAY: a rank did not, with its reason.
        """
        await self._done("weightsync_release", {"keep": list(keep)}, timeout_s)

    async def unmap(
        self, keep: Iterable[str], existing: Iterable[str], timeout_s: float
    ) -> frozenset[str] | None:
        """Release, and let every rank unmap segments that do not exist any more.

        Returns those that some rank still maps, by what every rank tells; None: one may map others,
        or did not tell.

        Args:
            keep: Apply ids.
            existing: Segments that still exist.
            timeout_s: Longest wait, seconds.
        """
        args = {"keep": list(keep), "segments": list(existing)}
        replies = await self._call("weightsync_release", args, timeout_s)
        mapped: set[str] = set()
        for rank, reply in zip(self.names, replies, strict=True):
            if not reply.get("ok"):
                why = reply.get("error", "")
                logger.warning("rank %s keeps memory that nobody needs: %s", rank, why)
            if not reply.get("ok") or reply.get("busy") or "mapped" not in reply:
                return None
            mapped.update(map(str, reply["mapped"]))
        return frozenset(mapped)

    async def _report(
        self,
        method: str,
        args: dict[str, Any],
        timeout_s: float,
        on_read: Callable[[int], None] | None = None,
    ) -> list[Report]:
        deadline = clock.monotonic() + timeout_s
        ticket = await self._start(method, args, timeout_s)
        return await self.reports(method, ticket, deadline - clock.monotonic(), on_read)

    async def _start(self, method: str, args: dict[str, Any], timeout_s: float) -> str:
        # A ticket tells this answer from the one that lay on the page before.
        ticket = secrets.token_hex(8)
        await self._done(method, {**args, "ticket": ticket}, timeout_s, _STUCK)
        return ticket

    async def reports(
        self,
        what: str,
        ticket: str,
        timeout_s: float,
        on_read: Callable[[int], None] | None = None,
    ) -> list[Report]:
        """Return what every rank writes on its page about the work of a ticket.

        Args:
            what: The work, for people.
            ticket: From its start.
            timeout_s: Longest wait, seconds.
            on_read: See `prepare`.
        """
        deadline = clock.monotonic() + timeout_s
        reports: list[Report | None] = [None] * len(self.names)
        while any(report is None for report in reports):
            if clock.monotonic() > deadline:
                raise WeightSyncError(
                    Reason.DEADLINE_EXCEEDED,
                    f"the ranks did not finish {what} within {timeout_s:.3g} s; raise "
                    "prepare_timeout or look at vLLM's log",
                )
            await asyncio.sleep(_POLL_S)
            if self._nodes is not None:
                self._nodes.check(self._changes)
            pages = self._pages.read()
            for index, page in enumerate(pages):
                reports[index] = reports[index] or read_report(self.names[index], ticket, page)
            if on_read is not None:
                on_read(min(shards_read(ticket, page) for page in pages))
        return [report for report in reports if report is not None]

    async def _done(
        self, method: str, args: dict[str, Any], timeout_s: float, remedy: str = ""
    ) -> list[dict[str, Any]]:
        """Return the replies when every rank has done its part, or raise what one refused."""
        replies = await self._call(method, args, timeout_s, remedy)
        for rank, reply in zip(self.names, replies, strict=True):
            _check(rank, reply)
        return replies

    async def _call(
        self, method: str, args: dict[str, Any], timeout_s: float, remedy: str = ""
    ) -> list[dict[str, Any]]:
        if self._nodes is not None:
            timeout_s -= await self._nodes.have(args, timeout_s)
        replies = await self._asked(
            lambda: self._engine.call_workers(method, args), method, timeout_s, remedy
        )
        return self._paired(replies, method)

    def _page(self) -> str:
        """Return the name of the pages; those that a node's server took with it are made anew."""
        if self._nodes is not None and self._changes != self._nodes.changes:
            self._changes = self._nodes.changes
            self._pages.close()
            self._pages = RankPages(self.names, self._segments)
        return self._pages.name

    async def _asked(
        self, call: Callable[[], Awaitable[_T]], what: str, timeout_s: float, remedy: str = ""
    ) -> _T:
        if self.hung:
            raise WeightSyncError(
                Reason.ENGINE_FENCED if self.may_write else Reason.APPLY_BUSY,
                "an earlier call to the ranks has not returned; wait for it or restart vLLM",
                retry_after_s=1.0,
            )
        task = asyncio.ensure_future(call())
        self._outstanding, self._asking = task, what
        # Its outcome may come when nobody waits any more.
        task.add_done_callback(_swallow)
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        if not done:
            raise WeightSyncError(
                Reason.DEADLINE_EXCEEDED,
                f"the ranks did not answer {what} within {timeout_s:g} s{remedy}",
            )
        return task.result()

    def _paired(self, replies: Sequence[Mapping[str, Any]], what: str) -> list[dict[str, Any]]:
        if len(replies) != len(self.names):
            raise WeightSyncError(
                Reason.FAULT,
                f"{len(replies)} ranks answered {what}, expected {len(self.names)}; restart vLLM "
                "if it stays so",
            )
        return [_own(rank, reply) for rank, reply in zip(self.names, replies, strict=True)]


def _check(rank: str, reply: dict[str, Any]) -> None:
    if not reply.get("ok"):
        raise refusal(
            rank,
            str(reply.get("error", "")),
            lasting=bool(reply.get("refused")),
            names=read_names(reply),
            count=int(reply.get("names_total", 0)),
        )


def _own(rank: str, reply: Mapping[str, Any]) -> dict[str, Any]:
    if reply.get("rank") == rank:
        return dict(reply)
    return {"ok": False, "error": f"answered as rank {reply.get('rank')!r}"}


def _swallow(task: asyncio.Task[Any]) -> None:
    # The answer to a call that was given up: the ranks are asked again before anything else.
    if not task.cancelled():
        task.exception()
