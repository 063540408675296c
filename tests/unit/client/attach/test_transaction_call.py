"""A transaction that ends otherwise than its trainer meant."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from weightsync.v1 import attach_pb2 as pb
from weightsync_client import ClientError, InvalidError, Reason
from weightsync_client.attach.transaction import TransactionCall


class _Stream(list[pb.WriteInPlaceResponse]):
    """A call of which the server gives these answers and then ends."""

    def cancel(self) -> None:
        pass


def _call(*answers: pb.WriteInPlaceResponse) -> TransactionCall:
    writing: Any = SimpleNamespace(open=lambda _steps: _Stream(answers))
    return TransactionCall(writing, pb.BeginInPlace(), lambda: None)


def _begun() -> pb.WriteInPlaceResponse:
    return pb.WriteInPlaceResponse(begun=pb.InPlaceBegun(transaction_id="t"))


def test_a_server_that_ends_it_without_a_reason_is_told_with_what_helps() -> None:
    with pytest.raises(ClientError, match=r"^attach again, and check the server's log") as caught:
        _call().begin(1)
    assert caught.value.reason is Reason.FAULT


def test_a_forked_child_commits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    call = _call(_begun())
    assert call.begin(1) == "t"
    child = os.getpid() + 1
    monkeypatch.setattr("os.getpid", lambda: child)
    with pytest.raises(InvalidError, match=r"^end forked children before the block ends"):
        call.commit()


def _refuse(_steps: object) -> Any:
    msg = "Cannot invoke RPC on closed channel!"
    raise ValueError(msg)


def _unread(patch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        msg = "can't start new thread"
        raise RuntimeError(msg)

    patch.setattr(threading.Thread, "start", fail)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("opens", [False, True])
def test_what_was_never_begun_is_taken_back_at_once(
    monkeypatch: pytest.MonkeyPatch, *, opens: bool
) -> None:
    """As rank 0 of several takes back what it could not begin, while the others go on."""
    call = _call(_begun())
    with monkeypatch.context() as patch:
        if opens:
            _unread(patch)
        else:
            patch.setattr(call._writing, "open", _refuse)
        with pytest.raises((ValueError, RuntimeError), match=r"Cannot invoke|can't start"):
            call.begin(1)
    call.abort()
    assert not call.writes
    with pytest.raises(InvalidError, match="this transaction was used; make a new one"):
        call.begin(1)


@pytest.mark.timeout(10)
def test_a_forked_child_renews_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for what its parent hears."""
    call = _call(_begun())
    call.begin(1)
    child = os.getpid() + 1
    with monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: child)
        with pytest.raises(InvalidError, match=r"^end forked children before the block ends"):
            call.renew(lambda: pytest.fail("its parent may be writing"))
