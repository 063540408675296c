"""The ranks of one engine: our worker methods, their status pages, and loads beside generation.

A worker RPC blocks EngineCore's only thread, so everything long runs in a thread of the worker and
reports on a status page; and an RPC is never cancelled, because its late replies would be read by
the next one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from weightsync import clock
from weightsync.engine import Engine, SwitchOrder
from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.segment_socket import SegmentServer
from weightsync.shm.status_page import PAGE_BYTES, PageReader
from weightsync_server.engine.refusals import refusal
from weightsync_server.engine.worker_reports import (
    NoPlan,
    RankCommit,
    RankLoad,
    RankState,
    Report,
    read_commit,
    read_common,
    read_load,
    read_names,
    read_no_plan,
    read_report,
    read_state,
    shards_read,
)
from weightsync_server.nodes import EngineNodes
from weightsync_server.ops.tasks import retrieve

logger = logging.getLogger(__name__)


class RankPages:
    """Published until `close`; `ranks` are `dp/pp/tp` of each.

    A rank finds its own page under `name`, a slash and its own name.
    """

    def __init__(self, ranks: Sequence[str], segments: SegmentServer) -> None:
        self.name = f"page-{secrets.token_hex(8)}"
        self._segments = segments
        self._pages: dict[str, PageReader] = {}
        try:
            for rank in ranks:
                page = self._pages[rank] = PageReader()
                segments.publish(f"{self.name}/{rank}", os.dup(page.segment.fd), PAGE_BYTES)
        except BaseException:
            self.close()
            raise

    def read(self) -> list[dict[str, Any] | None]:
        """Return what every rank has written last; None: nothing yet, or it is writing."""
        return [page.read() for page in self._pages.values()]

    def close(self) -> None:
        for rank, page in self._pages.items():
            self._segments.withdraw(f"{self.name}/{rank}")
            page.close()


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
    "; vLLM may be stopped or overloaded: check its log, and call again when GetStatus reports "
    "SERVING"
)


class Ranks:
    """Calls worker methods on every rank and reads their status pages.

    `names` are `dp/pp/tp` of each rank, in the order of replies. `nodes` stage for the ranks that
    are not on this host. `pending` have not finished what `reports` waits for.
    """

    def __init__(
        self,
        engine: Engine,
        names: Sequence[str],
        segments: SegmentServer,
        nodes: EngineNodes,
    ) -> None:
        self.names = tuple(names)
        self.pending: tuple[str, ...] = ()
        self._engine = engine
        self._pages = RankPages(self.names, segments)
        self._segments = segments
        self._nodes = nodes
        self._changes = nodes.changes
        # Apart from those of what else a rank does meanwhile; None: no version was loaded yet.
        self._load_pages: RankPages | None = None
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
        self._pages.close()
        if self._load_pages is not None:
            self._load_pages.close()

    async def states(self, timeout_s: float) -> list[RankState]:
        replies = await self._call("weightsync_state", {}, timeout_s)
        return [read_state(rank, reply) for rank, reply in zip(self.names, replies, strict=True)]

    async def stage(self, document: str, content_digest: str, timeout_s: float) -> None:
        """Return when every node of the engine has what a call in a pause will read.

        An empty `content_digest` stands for the one that the document gives.
        """
        args = {"document": document, "content_digest": content_digest}
        await self._nodes.have(args, timeout_s)

    async def capture(self, document: str, timeout_s: float) -> tuple[str, NoPlan | None]:
        """Build the load plan for a layout; the engine must be paused, and `stage` be done before.

        Returns the names of the tensors that no rank loads, for `prepare`, and why versions must be
        loaded, because a rank has no plan of the engine's checkpoint; None: each has one.
        SERVER_AWAY: a node has lost what it had staged, and the pause does not wait for it.
        """
        self._nodes.check_staged(document)
        args = {"document": document}
        replies = await self._done("weightsync_capture", args, timeout_s, _STUCK)
        why = read_no_plan(replies)
        return ("", why) if why else (read_common(replies, "ignored"), None)

    async def check(self, document: str, *, whole: bool = False) -> str:
        """Ask whether the model takes the tensors of a document, in whatever state the engine is.

        Returns the names, as `name_sets` packs them, of those that no rank has a place for.
        ENGINE_REFUSED names those that a rank does not take, or (`whole`: it has all tensors of a
        version) those that it needs besides.
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

        `document` names the segment that says where the version lies. With `proof_only` ranks that
        hold it do not claim that: it is no version. `base` is the apply id of what is live: where
        little differs from it, only that is prepared. `prefetched` is what the version was called
        when it was read ahead, and `unloaded` is from the capture of its layout, "" without one.
        Every rank must find `content_digest`, unless it is "".

        `on_read` is called with n, time and again, when no rank reads the first n shards any more,
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

    async def verify(self, apply_id: str, timeout_s: float, *, quick: bool = False) -> list[Report]:
        """Compare live parameters with a prepared version while generation runs.

        With `quick`, the engine stands still, and a rank may compare digests only that it took when
        it last compared them.
        """
        # Should it take too long, whatever comes next ends it.
        args = {"apply_id": apply_id, "page": self._page(), "gives_way": True, "quick": quick}
        return await self._report("weightsync_verify", args, timeout_s)

    async def start_check(self, apply_id: str) -> str:
        """Let every rank begin to compare as `verify` does; returns the ticket for `reports`.

        Whatever they are asked next ends it.
        """
        args = {"apply_id": apply_id, "page": self._page(), "gives_way": True}
        return await self._start("weightsync_verify", args, QUICK_S)

    async def attach(
        self, apply_id: str, request: Mapping[str, Any], timeout_s: float
    ) -> list[Report]:
        """Have every rank hand out its memory, or remember to whom; see `attachments`."""
        args = {"apply_id": apply_id, "page": self._page(), "gives_way": True, **request}
        return await self._report("weightsync_attach", args, timeout_s)

    async def unprove(self, timeout_s: float) -> None:
        """Have every rank of a paused engine take what is live for nothing proved.

        Somebody else writes it now. ENGINE_AWAY: a rank did not, with its reason.
        """
        await self._done("weightsync_unprove", {}, timeout_s)

    async def digest(self, apply_id: str, name: str, timeout_s: float) -> list[RankCommit]:
        """Have every rank take what somebody else has written for whole; the engine is paused.

        The ranks must have prepared the version of `apply_id`; `name` stands in for its digest.
        """
        args = {"apply_id": apply_id, "name": name, "parts": len(self.names) > 1}
        replies = await self._call("weightsync_digest", args, timeout_s)
        return [read_commit(rank, apply_id, r) for rank, r in zip(self.names, replies, strict=True)]

    async def start_prefetch(self, apply_id: str, document: str) -> None:
        """Let every rank read shards of a version as they come; what they are asked next ends it.

        A `prepare` that names `apply_id` waits for it and has the rest read.
        """
        args = {
            "apply_id": apply_id,
            "document": document,
            "page": self._page(),
        }
        await self._start("weightsync_ahead", args, QUICK_S)

    async def start_load(self, group: str, document: str) -> str:
        """Let every rank load a version beside generation; returns the ticket for `read_loads`.

        The loaders of a `group` start and end together; `document` names the segment that says
        where the version lies.
        """
        ticket = secrets.token_hex(8)
        if self._load_pages is None:
            self._load_pages = RankPages(self.names, self._segments)
        args = {"group": group, "document": document, "page": self._load_pages.name}
        args |= {"apply_id": f"load-{ticket}", "ticket": ticket}
        await self._done("weightsync_load", args, QUICK_S, _STUCK)
        return ticket

    def read_loads(self, ticket: str) -> list[RankLoad]:
        if self._load_pages is None:
            return [RankLoad(rank) for rank in self.names]
        pages = zip(self.names, self._load_pages.read(), strict=True)
        return [read_load(rank, ticket, page) for rank, page in pages]

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
        """Let every rank drop what it prepared, but for the named applies; all stays mapped."""
        await self._done("weightsync_release", {"keep": list(keep)}, timeout_s)

    async def unmap(
        self, keep: Iterable[str], existing: Iterable[str], timeout_s: float
    ) -> frozenset[str] | None:
        """Release, and let every rank unmap segments that do not exist any more.

        Returns those that some rank still maps, by what every rank tells; None: one may map others,
        or did not tell. `keep` are apply ids, `existing` the segments that still exist.
        """
        args = {"keep": list(keep), "segments": list(existing)}
        replies = await self._call("weightsync_release", args, timeout_s)
        mapped: set[str] = set()
        for rank, reply in zip(self.names, replies, strict=True):
            if not reply.get("ok"):
                why = reply.get("error", "")
                logger.warning("rank %s keeps memory that is no longer needed: %s", rank, why)
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

        `what` names the work in errors; see `prepare` for `on_read`.
        """
        deadline = clock.monotonic() + timeout_s
        reports: list[Report | None] = [None] * len(self.names)
        self.pending = self.names
        try:
            while self.pending:
                if clock.monotonic() > deadline:
                    raise WeightSyncError(
                        Reason.DEADLINE_EXCEEDED,
                        f"the ranks did not finish {what} within {timeout_s:.3g} s; raise "
                        "prepare_timeout, or check vLLM's log",
                    )
                await asyncio.sleep(_POLL_S)
                self._nodes.check(self._changes)
                pages = self._pages.read()
                for index, page in enumerate(pages):
                    reports[index] = reports[index] or read_report(self.names[index], ticket, page)
                if on_read is not None:
                    on_read(min(shards_read(ticket, page) for page in pages))
                named = zip(self.names, reports, strict=True)
                self.pending = tuple(name for name, report in named if report is None)
        finally:
            self.pending = ()
        return [report for report in reports if report is not None]

    async def _done(
        self, method: str, args: dict[str, Any], timeout_s: float, remedy: str = ""
    ) -> list[dict[str, Any]]:
        replies = await self._call(method, args, timeout_s, remedy)
        for rank, reply in zip(self.names, replies, strict=True):
            _check(rank, reply)
        return replies

    async def _call(
        self, method: str, args: dict[str, Any], timeout_s: float, remedy: str = ""
    ) -> list[dict[str, Any]]:
        timeout_s -= await self._nodes.have(args, timeout_s)
        replies = await self._asked(
            lambda: self._engine.call_workers(method, args), method, timeout_s, remedy
        )
        return self._paired(replies, method)

    def _page(self) -> str:
        """Return the name of the pages; those that a node's server took with it are made anew."""
        if self._changes != self._nodes.changes:
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
        # Its outcome may come when nobody waits any more; the ranks are asked again then.
        task.add_done_callback(retrieve)
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
                "if this repeats",
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
