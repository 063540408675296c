"""Which process is at the other end of a socket, by the kernel's word."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from weightsync.errors import Reason, WeightSyncError
from weightsync.wire.socket_server import PeerCredentials, peer_process


class _Peer:
    """A socket of a kernel that answers so."""

    def __init__(self, number: int) -> None:
        self._number = number

    def getsockopt(self, *_: object) -> int:
        raise OSError(self._number, os.strerror(self._number))


def _process(number: int, pid: int) -> int:
    peer: Any = _Peer(number)
    return peer_process(peer, PeerCredentials(pid, os.getuid()))


def test_an_older_kernel_knows_a_process_by_its_pid() -> None:
    os.close(_process(errno.ENOPROTOOPT, os.getpid()))


def test_on_an_older_kernel_one_of_a_pid_namespace_that_is_not_seen_is_refused() -> None:
    with pytest.raises(WeightSyncError, match="in the PID namespace of weightsync-") as caught:
        _process(errno.ENOPROTOOPT, 0)
    assert caught.value.reason is Reason.NOT_SUPPORTED


@pytest.mark.parametrize("pid", [0, 1])
def test_one_that_has_ended_is_no_other_that_has_its_pid(pid: int) -> None:
    with pytest.raises(ProcessLookupError):
        _process(errno.ESRCH, pid)
