"""A transaction of a trainer that writes an engine's live parameters."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

import grpc

from weightsync.errors import Reason
from weightsync.v1 import attach_pb2 as pb
from weightsync.v1 import attach_pb2_grpc
from weightsync_client.errors import ClientError, from_rpc, refuse
from weightsync_client.rpc import calls, convert

if TYPE_CHECKING:
    import torch

    from weightsync_client import types
    from weightsync_client.options import PauseChoices
    from weightsync_client.rpc.channels import Link

__all__ = ["InPlaceTransaction", "Writing"]


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

    def settle(self) -> None:
        """Wait until whatever is queued on GPUs is done."""


@dataclass(frozen=True)
class Writing:
    """How a client begins transactions.

    Attributes:
        model: Name of the model.
        link: To the server.
        channel: Its channel.
        push: As `Client.push`.
    """

    model: str
    link: Link
    channel: grpc.Channel
    push: Callable[..., object]

    def open(self, steps: Iterator[pb.WriteInPlaceRequest]) -> Any:
        """Open WriteInPlace with these messages."""
        stub = attach_pb2_grpc.AttachServiceStub(self.channel)
        return stub.WriteInPlace(steps, metadata=self.link.metadata)


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
        id: Names it, in the server's log and status; "": it has not begun.
        paused_s: How long nothing was generated, seconds, once the engine goes on.
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
        source: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        version = attached.version
        self._begin = calls.begin_in_place(writing.model, attached.engine, version, lease_s, pause)
        self._writing, self._attached, self._lease_s = writing, attached, lease_s
        self._steps: queue.SimpleQueue[pb.WriteInPlaceRequest | None] = queue.SimpleQueue()
        self._call: Any = None
        self._background, self._before, self._source = background, before, source
        self._following: Future[None] | None = None
        self.id = ""
        self.paused_s = 0.0
        self.report: types.ApplyReport | None = None

    def __enter__(self) -> Self:
        """Have the engine stand still, once the transaction before this one has ended.

        Raises:
            ClientError: Nothing was paused, with the reason; or that one did not count.
        """
        if self._call is not None:
            raise refuse(Reason.REQUEST_INVALID, "this transaction was used; make a new one")
        before, self._before = self._before, None
        if before is not None:
            before.result()
        self._begin.base_version = self._attached.version
        self._steps.put(pb.WriteInPlaceRequest(begin=self._begin))
        self._call = self._writing.open(iter(self._steps.get, None))
        try:
            self.id = self._answer().begun.transaction_id
        except BaseException:
            self._end()
            raise
        return self

    def renew(self) -> None:
        """Say that this trainer is at work still: it has its whole lease again."""
        self._steps.put(pb.WriteInPlaceRequest(renew=pb.RenewInPlace()))

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
            if error is not None:
                self._take_back()
            version = 0 if error is not None else self._go_live()
        except BaseException:
            self._end()
            raise
        if not version:
            self._end()
        elif self._background:
            pool = ThreadPoolExecutor(1, thread_name_prefix="in place")
            self._following = pool.submit(self._follow, version)
            pool.shutdown(wait=False)
        else:
            self._follow(version)

    def result(self) -> types.ApplyReport | None:
        """Wait until what was written is pushed and proved; None: nothing was.

        Raises:
            ClientError: As the end of the block.
        """
        if self._following is not None:
            self._following.result()
        return self.report

    def _go_live(self) -> int:
        self._steps.put(pb.WriteInPlaceRequest(commit=pb.CommitInPlace()))
        live = self._answer().live
        self.paused_s = live.paused.ToNanoseconds() / 1e9
        return live.version

    def _follow(self, version: int) -> None:
        """Push what is live, and wait until every rank is proved to hold that."""
        try:
            self._push(version)
            self._steps.put(pb.WriteInPlaceRequest(copied=pb.CopiedInPlace()))
            self.report = convert.to_report(self._answer().committed.report)
            self._attached.version = self.report.version
            self._attached.content_digest = self.report.content_digest
        finally:
            self._end()

    def _push(self, version: int) -> None:
        try:
            with self._renewed():
                # A copy of the model, for deltas of later ones, would take a trainer's memory.
                options = {"version": version, "idempotency_key": self.id, "delta": "never"}
                self._writing.push(self._content(), **options)
        except BaseException:
            self._take_back()
            raise

    def _content(self) -> dict[str, torch.Tensor]:
        """Return every tensor whole; a view where it lies so."""
        if self._source is not None:
            return dict(self._source)
        whole = self._attached
        return {name: whole[name] if name in whole else whole.read(name) for name in whole.boxes}

    def _take_back(self) -> None:
        self._steps.put(pb.WriteInPlaceRequest(abort=pb.AbortInPlace()))
        # That it was put back is what was asked for.
        with contextlib.suppress(ClientError):
            self._answer()

    @contextlib.contextmanager
    def _renewed(self) -> Iterator[None]:
        """Renew the lease for as long as the block lasts."""
        over = threading.Event()

        def renew() -> None:
            while not over.wait(self._lease_s / 3):
                self.renew()

        thread = threading.Thread(target=renew, name="in place lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _answer(self) -> pb.WriteInPlaceResponse:
        try:
            answer: pb.WriteInPlaceResponse = next(self._call)
        except grpc.RpcError as error:
            raise from_rpc(
                error, method="WriteInPlace", address=self._writing.link.address
            ) from None
        except StopIteration:
            raise refuse(Reason.FAULT, "the server has ended the transaction unasked") from None
        return answer

    def _end(self) -> None:
        self._steps.put(None)
        if self._call is not None:
            self._call.cancel()
