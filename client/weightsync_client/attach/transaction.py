"""A transaction of a trainer that writes an engine's live parameters, and its one call."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

import grpc

from weightsync.errors import Reason
from weightsync.v1 import attach_pb2 as pb
from weightsync.v1 import attach_pb2_grpc
from weightsync_client import types
from weightsync_client.errors import ClientError, from_rpc, invalid, refuse
from weightsync_client.options import PauseChoices
from weightsync_client.probes import Probes, check_probes
from weightsync_client.rpc import calls
from weightsync_client.rpc.channels import Link
from weightsync_client.rpc.convert import to_report

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Writing:
    """How a client begins transactions; `push` is as `Client.push`."""

    model: str
    link: Link
    channel: grpc.Channel
    push: Callable[..., object]

    def with_probes(self, probes: Probes | None) -> Writing:
        """Return the same with a push that sends probes as well; refuses what are none."""
        check_probes(probes)
        return self if probes is None else replace(self, push=partial(self.push, probes=probes))

    def open(self, steps: Iterator[pb.WriteInPlaceRequest]) -> Any:
        """Open WriteInPlace with these messages."""
        stub = attach_pb2_grpc.AttachServiceStub(self.channel)
        return stub.WriteInPlace(steps, metadata=self.link.metadata)


class TransactionCall:
    """A transaction as the server has it; any failure ends it.

    `revoke` is called, in a thread of its own, when the server has ended the block: writes must not
    reach what is served any more. `id` is "" until it has begun. `writes` says whether the trainer
    may write. `paused_s`, and the `push_key` by which its push is known, are once the engine goes
    on.
    """

    def __init__(
        self, writing: Writing, begin: pb.BeginInPlace, revoke: Callable[[], None]
    ) -> None:
        self._writing, self._begin, self._revoke = writing, begin, revoke
        self._answers: queue.SimpleQueue[pb.WriteInPlaceResponse | BaseException] = (
            queue.SimpleQueue()
        )
        self._lost = self._live = False
        self._steps: queue.SimpleQueue[pb.WriteInPlaceRequest | None] = queue.SimpleQueue()
        self._call: Any = None
        self._pid = 0
        self.id = self.push_key = ""
        self.writes = False
        self.paused_s = 0.0

    def begin(self, base_version: int) -> str:
        """Pause the engine; return the id. After a ClientError nothing was paused."""
        if self._pid:
            raise invalid("this transaction was used; make a new one")
        self._pid = os.getpid()
        self._begin.base_version = base_version
        self._steps.put(pb.WriteInPlaceRequest(begin=self._begin))
        call = self._writing.open(iter(self._steps.get, None))
        reader = threading.Thread(
            target=self._read, args=[call], name="in place answers", daemon=True
        )
        try:
            reader.start()
        except BaseException:
            self._steps.put(None)
            call.cancel()
            raise
        # Not until then: of what nobody reads no answer is waited for.
        self._call = call
        self.id = self._answer().begun.transaction_id
        self.writes = True
        return self.id

    def renew(self, let_go: Callable[[], None]) -> None:
        """Tell the server that this trainer is still at work.

        Calls `let_go` and raises as `check` does; raises REQUEST_INVALID in a forked child.
        """
        if self._call is not None:
            self._refuse_child("renew")
        self.check(let_go)
        self._renew()

    def check(self, let_go: Callable[[], None]) -> None:
        """Return if the server has not ended the block, else raise a ClientError with its reason.

        `let_go` releases what is written. It is called before the reason is waited for, because the
        server says nothing more as long as any process can write.
        """
        if self._lost and not self._live:
            let_go()
            self._answer()

    def _read(self, call: Any) -> None:
        """Hear the server, also while the trainer computes."""
        try:
            for answer in call:
                if answer.WhichOneof("outcome") == "revoked":
                    self._lose()
                else:
                    self._answers.put(answer)
        except BaseException as error:  # noqa: BLE001 - raised by who waits for an answer
            self._lose()
            self._answers.put(error)
        else:
            self._lose()
            self._answers.put(StopIteration())

    def _lose(self) -> None:
        self._lost = True
        # By the end of a block that this trainer ended itself, the next one may have begun.
        if self.writes:
            self._revoke()

    def _renew(self) -> None:
        self._steps.put(pb.WriteInPlaceRequest(renew=pb.RenewInPlace()))

    @contextlib.contextmanager
    def renewed(self) -> Iterator[None]:
        """Renew the lease for as long as the block lasts; take all back if it fails.

        What fails because the server has taken all back raises how that has ended.
        """
        over = threading.Event()
        lease_s = self._begin.lease.ToNanoseconds() / 1e9

        def renew() -> None:
            while not over.wait(lease_s / 3):
                self._renew()

        thread = threading.Thread(target=renew, name="in place lease", daemon=True)
        thread.start()
        try:
            yield
        except BaseException as error:
            ended = self.abort()
            taken_back = isinstance(error, ClientError) and error.reason is Reason.APPLY_RESTORED
            if taken_back and ended is not None:
                raise ended from error
            raise
        finally:
            over.set()
            thread.join()

    def commit(self) -> int:
        """Have the engine generate on what was written; return its version.

        Raises APPLY_RESTORED or ENGINE_FENCED, or REQUEST_INVALID in a forked child.
        """
        self._refuse_child("commit")
        self._steps.put(pb.WriteInPlaceRequest(commit=pb.CommitInPlace()))
        live = self._answer().live
        self.writes, self._live = False, True
        self.paused_s = live.paused.ToNanoseconds() / 1e9
        # A server of an older release goes by the id.
        self.push_key = live.push_key or self.id
        return live.version

    def finish(self) -> types.ApplyReport:
        """Return when every rank is proved to hold what was pushed.

        Raises APPLY_RESTORED or ENGINE_FENCED.
        """
        self._steps.put(pb.WriteInPlaceRequest(copied=pb.CopiedInPlace()))
        report = to_report(self._answer().committed.report)
        self._end()
        return report

    def abort(self) -> ClientError | None:
        """Take all back; return how that has ended, once the version before is served.

        Does nothing in a forked child, or where nothing was begun.
        """
        if self._call is None or self._forked:
            return None
        self._steps.put(pb.WriteInPlaceRequest(abort=pb.AbortInPlace()))
        ended: ClientError | None = None
        try:
            self._answer()
        except ClientError as error:
            # That it was put back is what was asked for.
            ended = error
        self._end()
        return ended

    @property
    def _forked(self) -> bool:
        """Whether this is another process than began, where nothing of gRPC may be touched."""
        return self._pid != os.getpid()

    def _refuse_child(self, what: str) -> None:
        if self._forked:
            raise invalid(
                "end forked children before the block ends: only the process that began the "
                f"transaction can {what} it",
            )

    def _answer(self) -> pb.WriteInPlaceResponse:
        try:
            answer = self._answers.get()
            if isinstance(answer, BaseException):
                # It is the last one, for whoever asks again.
                self._answers.put(answer)
                raise answer
        except grpc.RpcError as error:
            self._end()
            raise from_rpc(
                error, method="WriteInPlace", address=self._writing.link.address
            ) from None
        except StopIteration:
            self._end()
            raise refuse(
                Reason.FAULT,
                "attach again, and check the server's log: it ended the transaction without "
                "a reason",
            ) from None
        except BaseException:
            self._end()
            raise
        return answer

    def _end(self) -> None:
        self.writes = False
        self._steps.put(None)
        self._call.cancel()


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
    """Between `with` and its end the engine is paused, and the live weights may be written.

    At the end every rank digests what it holds, and the engine generates on it. Then what was
    written is pushed, as a version like any other, and every rank is proved to hold that. Where the
    block raises, or anything else goes wrong, the version before is restored, proved and served; so
    it is when this process dies.

    After `lease_s` without a sign of this process, the same happens. With `background`, another
    thread pushes what is live, after the block. `before` is the transaction before this one.
    `source` is what is written, and pushed then; with None, what is live by then is pushed.
    `report`, as of an apply, is set once the transaction has ended well.
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
        """Pause the engine; return the id."""
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

        Raises a ClientError if its block is still open, or if it failed.
        """
        if self._before is not None:
            self._before.check_over()
            self._before.result()
            # Not until then: whoever was refused, or interrupted, has waited for nothing.
            self._before = None

    def check_over(self) -> None:
        """Raise a ClientError (REQUEST_INVALID) if the block has not ended."""
        if self.call.writes:
            raise invalid(
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
        """Run `work`, which pushes and proves what is live, in another thread if that was asked."""
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
            options = {"version": version, "idempotency_key": self.call.push_key, "delta": "never"}
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
