"""A transaction that ends otherwise than its trainer meant."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from weightsync.v1 import attach_pb2 as pb
from weightsync_client import ClientError, InvalidError, Reason
from weightsync_client.attach.transaction_call import TransactionCall


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
    with pytest.raises(ClientError, match=r"^attach again and see the server's log") as caught:
        _call().begin(1)
    assert caught.value.reason is Reason.FAULT


def test_a_forked_child_commits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    call = _call(_begun())
    assert call.begin(1) == "t"
    child = os.getpid() + 1
    monkeypatch.setattr("os.getpid", lambda: child)
    with pytest.raises(InvalidError, match=r"^end forked children before the block ends"):
        call.commit()
