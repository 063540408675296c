"""One call of WriteInPlace: what a trainer says, and what it is answered."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from weightsync.errors import Reason
from weightsync.v1 import attach_pb2 as pb
from weightsync.v1 import attach_pb2_grpc
from weightsync_client.errors import ClientError, from_rpc, refuse
from weightsync_client.rpc import convert

if TYPE_CHECKING:
    from weightsync_client import types
    from weightsync_client.rpc.channels import Link

__all__ = ["TransactionCall", "Writing"]


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


class TransactionCall:
    """A transaction as the server has it. Whatever fails ends it.

    Args:
        writing: How it is begun.
        begin: With what.
        revoke: Called, in a thread of its own, when the server has ended the block: what is written
            from then on must not be what is served.

    Attributes:
        id: Names it; "": it has not begun.
        writes: Whether the trainer may write.
        paused_s: How long nothing was generated, seconds, once the engine goes on.
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
        self.id = ""
        self.writes = False
        self.paused_s = 0.0

    def begin(self, base_version: int) -> str:
        """Have the engine stand still; return the id.

        Args:
            base_version: What was computed on.

        Raises:
            ClientError: Nothing was paused.
        """
        if self._pid:
            raise refuse(Reason.REQUEST_INVALID, "this transaction was used; make a new one")
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
        """Say that this trainer is at work still.

        Args:
            let_go: As of `check`.

        Raises:
            ClientError: The server has ended it, with the reason; REQUEST_INVALID in a child that
                was forked.
        """
        if self._call is not None:
            self._refuse_child("renew")
        self.check(let_go)
        self._renew()

    def check(self, let_go: Callable[[], None]) -> None:
        """Return if the server has not ended the block.

        Args:
            let_go: Lets go of what is written. Called before the reason is waited for, because the
                server says nothing more as long as somebody can write.

        Raises:
            ClientError: It has, with the reason.
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
        """Renew the lease for as long as the block lasts; take all back if it fails."""
        over = threading.Event()
        lease_s = self._begin.lease.ToNanoseconds() / 1e9

        def renew() -> None:
            while not over.wait(lease_s / 3):
                self._renew()

        thread = threading.Thread(target=renew, name="in place lease", daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            self.abort()
            raise
        finally:
            over.set()
            thread.join()

    def commit(self) -> int:
        """Have the engine generate on what was written; return its version.

        Raises:
            ClientError: APPLY_RESTORED, ENGINE_FENCED; REQUEST_INVALID in a child that was forked.
        """
        self._refuse_child("commit")
        self._steps.put(pb.WriteInPlaceRequest(commit=pb.CommitInPlace()))
        live = self._answer().live
        self.writes, self._live = False, True
        self.paused_s = live.paused.ToNanoseconds() / 1e9
        return live.version

    def finish(self) -> types.ApplyReport:
        """Return when every rank is proved to hold what was pushed.

        Raises:
            ClientError: APPLY_RESTORED, ENGINE_FENCED.
        """
        self._steps.put(pb.WriteInPlaceRequest(copied=pb.CopiedInPlace()))
        report = convert.to_report(self._answer().committed.report)
        self._end()
        return report

    def abort(self) -> None:
        """Take all back, and return when the version before is served.

        In a child that was forked, or where nothing was begun: nothing.
        """
        if self._call is None or self._forked:
            return
        self._steps.put(pb.WriteInPlaceRequest(abort=pb.AbortInPlace()))
        # That it was put back is what was asked for.
        with contextlib.suppress(ClientError):
            self._answer()
        self._end()

    @property
    def _forked(self) -> bool:
        """Whether this is another process than began, where nothing of gRPC may be touched."""
        return self._pid != os.getpid()

    def _refuse_child(self, what: str) -> None:
        if self._forked:
            raise refuse(
                Reason.REQUEST_INVALID,
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
                "attach again and see the server's log: it ended the transaction without a reason",
            ) from None
        except BaseException:
            self._end()
            raise
        return answer

    def _end(self) -> None:
        self.writes = False
        self._steps.put(None)
        self._call.cancel()
