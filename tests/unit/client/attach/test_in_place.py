"""A trainer's transaction on memory of a GPU, which cannot be taken back while work is queued."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from weightsync.v1 import attach_pb2 as pb
from weightsync_client import ClientError, Reason
from weightsync_client.attach.transaction import InPlaceTransaction

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(30)

_PATIENCE_S = 2.0


class _Server:
    """Begins a transaction, ends its block, and then waits for the trainer to let go of the gate.

    Attributes:
        ends: Set: it ends the block.
        heard: Set: its trainer knows.
        let_go: Set: the trainer's gate is closed.
        done: What the trainer has done, in order.
        fenced: Whether the server has waited in vain.
    """

    def __init__(self) -> None:
        self.ends, self.heard, self.let_go = (threading.Event() for _ in range(3))
        self.done: list[str] = []
        self.fenced = False

    def answers(self, _steps: Iterator[pb.WriteInPlaceRequest]) -> Any:
        return _Call(self)

    def run(self) -> Iterator[pb.WriteInPlaceResponse]:
        yield pb.WriteInPlaceResponse(begun=pb.InPlaceBegun(transaction_id="t"))
        self.ends.wait()
        yield pb.WriteInPlaceResponse(revoked=pb.InPlaceRevoked(reason="a rollback"))
        self.fenced = not self.let_go.wait(_PATIENCE_S)
        reason = Reason.ENGINE_FENCED if self.fenced else Reason.APPLY_RESTORED
        raise ClientError(reason, "it has ended")


class _Call:
    def __init__(self, server: _Server) -> None:
        self._answers = server.run()

    def __iter__(self) -> Iterator[pb.WriteInPlaceResponse]:
        return self._answers

    def cancel(self) -> None:
        pass


class _Gpu:
    """What a trainer has of a GPU: a gate that is open while it writes.

    Attributes:
        on_open: Called when its gate is opened.
    """

    engine, version, content_digest, attachment = "e", 1, "c", "a"
    boxes: Any = ()

    def __init__(self, server: _Server) -> None:
        self._server = server
        self.on_open: Any = lambda: None

    def open_block(self, _: str) -> None:
        self.on_open()

    def close_block(self) -> None:
        self._server.done.append("closed")
        self._server.let_go.set()

    def revoke_block(self, *, settled: bool = False) -> None:
        if settled:
            self._server.done.append("left")
            self._server.let_go.set()
        else:
            self._server.heard.set()

    def settle(self) -> None:
        self._server.done.append("settled")

    def check_open(self) -> None:
        pass


def _made(server: _Server, *, background: bool = False) -> tuple[InPlaceTransaction, _Gpu]:
    gpu: Any = _Gpu(server)
    link = SimpleNamespace(address="a")
    writing: Any = SimpleNamespace(model="m", link=link, open=server.answers, push=None)
    return InPlaceTransaction(writing, gpu, 60.0, {}, background=background), gpu


def _revoked(server: _Server) -> None:
    server.ends.set()
    assert server.heard.wait(10)


def test_who_renews_what_has_ended_lets_go_of_it_first() -> None:
    server = _Server()
    transaction, _ = _made(server)

    def block() -> None:
        with transaction:
            _revoked(server)
            transaction.renew()

    with pytest.raises(ClientError) as caught:
        block()
    assert caught.value.reason is Reason.APPLY_RESTORED
    assert not server.fenced
    # Kernels that are queued still would write what is put back.
    assert server.done[:2] == ["settled", "left"]


def test_a_thread_that_renews_does_not_let_go_of_what_another_writes() -> None:
    server = _Server()
    transaction, _ = _made(server)
    transaction.begin()
    _revoked(server)
    with ThreadPoolExecutor(1) as pool, pytest.raises(ClientError) as caught:
        pool.submit(transaction.renew).result()
    assert caught.value.reason is Reason.ENGINE_FENCED
    assert not server.done
    with pytest.raises(ClientError):
        transaction.renew()
    assert server.done == ["settled", "left"]


def test_who_is_interrupted_while_it_waits_has_not_waited() -> None:
    """Closing waits for it again, before it unmaps what a push may be reading."""
    transaction, _ = _made(_Server(), background=True)
    may_push = threading.Event()

    def push() -> None:
        may_push.wait(20)
        raise ClientError(Reason.APPLY_RESTORED, "it did not count")

    transaction.follow(push)
    # Who is run in the background may ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        transaction.result()
    signal.signal(signal.SIGINT, before)
    threading.Timer(0.1, may_push.set).start()
    with pytest.raises(ClientError, match="it did not count"):
        transaction.result()
    assert transaction.result() is None


def test_a_forked_child_waits_for_no_push_of_its_parent() -> None:
    """As the end of `with client.attach()` does, where a child leaves that, too."""
    transaction, _ = _made(_Server(), background=True)
    may_push = threading.Event()

    def push() -> None:
        may_push.wait(20)

    transaction.follow(push)
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)
        transaction.result()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    may_push.set()
    transaction.result()
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_block_that_has_ended_while_it_was_opened_is_closed_first() -> None:
    server = _Server()
    transaction, gpu = _made(server)
    gpu.on_open = lambda: _revoked(server)
    with pytest.raises(ClientError) as caught:
        transaction.begin()
    assert caught.value.reason is Reason.APPLY_RESTORED
    assert not server.fenced
