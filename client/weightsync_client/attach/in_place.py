"""A transaction of a trainer that writes an engine's live parameters."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from weightsync.errors import Reason
from weightsync_client.attach.transaction_call import TransactionCall
from weightsync_client.errors import refuse
from weightsync_client.rpc import calls

if TYPE_CHECKING:
    import torch

    from weightsync_client import types
    from weightsync_client.attach.transaction_call import Writing
    from weightsync_client.options import PauseChoices

__all__ = ["InPlaceTransaction"]


class Writable(Protocol):
    """Live parameters of an engine; see `Attached`."""

    engine: str
    version: int
    content_digest: str
    boxes: Mapping[str, Any]

    def __contains__(self, name: object, /) -> bool: ...

    def __getitem__(self, name: str, /) -> torch.Tensor: ...

    def read(self, name: str) -> torch.Tensor:
        """Return a copy of a whole tensor."""

    @property
    def attachment(self) -> str:
        """What this is called when a transaction begins."""

    def open_block(self, transaction: str) -> None:
        """Have the parameters writable, in the block of a transaction."""

    def close_block(self) -> None:
        """Have them readable only; also where no block is open."""

    def revoke_block(self, *, settled: bool = False) -> None:
        """Have what is written from now on served by nobody; on a GPU once that has `settled`."""

    def settle(self) -> None:
        """Wait until whatever is queued on GPUs is done."""

    def check_open(self) -> None:
        """Refuse what was closed."""


class InPlaceTransaction:
    """Between `with` and its end the engine stands still, and what is live may be written.

    At the end every rank digests what it holds, and the engine generates on it. Then what was
    written is pushed, as a version like any other, and every rank is proved to hold that. Where the
    block raises, or anything else goes wrong, the version before is put back, proved and served; so
    it is when this process dies.

    Args:
        writing: How it is begun.
        attached: What is written.
        lease_s: How long this may be silent, seconds.
        pause: How the engine pauses.
        background: Whether what is live is pushed by another thread, after the block.
        before: The transaction before this one.
        source: What is written, and pushed then; None: what is live by then.

    Attributes:
        report: As of an apply, once it has ended well.
    """

    def __init__(
        self,
        writing: Writing,
        attached: Writable,
        lease_s: float,
        pause: PauseChoices,
        *,
        background: bool = False,
        before: InPlaceTransaction | None = None,
        source: Mapping[str, object] | None = None,
    ) -> None:
        begin = calls.begin_in_place(writing.model, attached.engine, 0, lease_s, pause)
        begin.attachment = attached.attachment
        self.call = TransactionCall(writing, begin, attached.revoke_block)
        self._push, self._attached, self._source = writing.push, attached, source
        self._background, self._before = background, before
        self._following: Future[None] | None = None
        self._writer = self._pid = 0
        self.report: types.ApplyReport | None = None

    @property
    def id(self) -> str:
        """Names it, in the server's log and status; "": it has not begun."""
        return self.call.id

    @property
    def paused_s(self) -> float:
        """How long nothing was generated, seconds, once the engine goes on."""
        return self.call.paused_s

    def __enter__(self) -> Self:
        """Have the engine stand still, once the transaction before this one has ended.

        Raises:
            ClientError: Nothing was paused, with the reason; or that one did not count.
        """
        self.begin()
        return self

    def begin(self) -> str:
        """Have the engine stand still; return the id."""
        self.wait_for_before()
        self._attached.check_open()
        name = self.call.begin(self._attached.version)
        self._writer = threading.get_ident()
        try:
            self._attached.open_block(name)
            self.call.check(self._attached.close_block)
        except BaseException:
            self.abort()
            raise
        return name

    def abort(self) -> None:
        """Take all back, and return when the version before is served."""
        # Until then the server waits.
        self._attached.close_block()
        self.call.abort()

    def wait_for_before(self) -> None:
        """Return when the transaction before this one has ended.

        Raises:
            ClientError: Its block has not; or it did not count.
        """
        if self._before is not None:
            self._before.check_over()
            self._before.result()
            # Not until then: whoever was refused, or interrupted, has waited for nothing.
            self._before = None

    def check_over(self) -> None:
        """Refuse to wait for a block that has not ended.

        Raises:
            ClientError: REQUEST_INVALID.
        """
        if self.call.writes:
            raise refuse(
                Reason.REQUEST_INVALID,
                f"transaction {self.id} of this trainer is open; begin one when that has ended",
            )

    def renew(self) -> None:
        """Say that this trainer is at work still: it has its whole lease again.

        Raises:
            ClientError: It has ended already: nothing may be written any more.
        """
        self.call.renew(self._let_go)

    def _let_go(self) -> None:
        # Another thread, which renews while this one computes, cannot know what is still written.
        if threading.get_ident() == self._writer:
            self._attached.settle()
            self._attached.revoke_block(settled=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Make what was written live, and push it; after an error have it taken back.

        Raises:
            ClientError: APPLY_RESTORED: the version before is served again; ENGINE_FENCED.
        """
        try:
            # Kernels that are queued still would write what is put back, or digested.
            self._attached.settle()
        except BaseException:
            self.abort()
            raise
        if error is not None:
            self.abort()
            return
        self._attached.close_block()
        version = self.call.commit()
        self.follow(lambda: self._push_live(version))

    def follow(self, work: Callable[[], None]) -> None:
        """Do what comes after the engine generates again, in another thread if that was asked for.

        Args:
            work: Pushes what is live, and waits until every rank is proved to hold that.
        """
        if not self._background:
            work()
            return
        self._pid = os.getpid()
        pool = ThreadPoolExecutor(1, thread_name_prefix="in place")
        self._following = pool.submit(work)
        pool.shutdown(wait=False)

    def result(self) -> types.ApplyReport | None:
        """Wait until what was written is pushed and proved; None: nothing was.

        In a child that was forked nothing is waited for: the push is its parent's.

        Raises:
            ClientError: As the end of the block; the first call alone.
        """
        # One that was refused before it has begun leaves that to whoever comes next.
        self.wait_for_before()
        following = self._following
        if following is not None and self._pid == os.getpid():
            futures.wait([following])
            # Not until then, as above.
            self._following = None
            following.result()
        return self.report

    def _push_live(self, version: int) -> None:
        with self.call.renewed():
            # A copy of the model, for deltas of later ones, would take a trainer's memory.
            options = {"version": version, "idempotency_key": self.id, "delta": "never"}
            # What every rank holds, in whatever dtype, is what is pushed.
            self._push(self._content(), dtype="keep", **options)
        self.finish()

    def finish(self) -> types.ApplyReport:
        """Return when every rank is proved to hold what was pushed."""
        report = self.call.finish()
        self.note(report)
        return report

    def note(self, report: types.ApplyReport) -> None:
        """Take note of how it has ended."""
        self.report = report
        self._attached.version = report.version
        self._attached.content_digest = report.content_digest

    def _content(self) -> dict[str, object]:
        """Return every tensor whole; a view where it lies so."""
        if self._source is not None:
            return dict(self._source)
        whole = self._attached
        return {name: whole[name] if name in whole else whole.read(name) for name in whole.boxes}
