"""A trainer that forks a data loader in the midst of a hand-off.

    python -m tests.support.forking_trainer SOCKET SECRET MOMENT

A thread borrows shard 0, writes to it, and gives it back; at the moment it stands still while the
main thread forks. It prints the process id of the child, which lives on, and ends. MOMENT is one of
`MOMENTS`, or:

- inside: the thread itself forks where it has received and not noted, as a finaliser may
- free: the main thread forks at no such moment, then parent and child do a hand-off each
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from weightsync.shm import same_host
from weightsync.shm.same_host import SameHostClient
from weightsync.shm.segments import MemoryMapping
from weightsync.wire import socket_client

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MOMENTS", "SIZE"]

SIZE = 4 << 20
#: Where a thread may be when another one forks: what it calls there, and whether it stands still
#: after that call or before it.
MOMENTS: dict[str, tuple[Any, str, bool]] = {
    "connecting": (socket, "socket", True),
    "received": (socket_client, "receive_fds", True),
    "mapped": (MemoryMapping, "keep_from_children", False),
    "writing": (same_host, "map_lease", True),
    "giving back": (os, "close", False),
}
#: Seconds that a thread stands still for a fork, which may have to wait for it.
_STILL_S = 1.0


class _Fork:
    """Has the main thread fork while another one stands still."""

    def __init__(self) -> None:
        self._still = threading.Event()
        self._forked = threading.Event()

    def stand(self) -> None:
        """Stand still until the fork, or for a moment where that has to wait; once."""
        if threading.current_thread() is not threading.main_thread() and not self._still.is_set():
            self._still.set()
            self._forked.wait(_STILL_S)

    def fork(self) -> int:
        """Fork at the moment; return the child, which stays."""
        assert self._still.wait(30)
        child = os.fork()
        if child == 0:
            os.closerange(0, 3)
            signal.pause()
        self._forked.set()
        return child


def _standing(moment: str, stand: Callable[[], None]) -> None:
    """Have `stand` called at the moment."""
    owner, name, after = MOMENTS[moment]
    real = getattr(owner, name)

    def call(*arguments: Any) -> Any:
        if not after:
            stand()
        result = real(*arguments)
        if after:
            stand()
        return result

    setattr(owner, name, call)


def _hand_off(path: str, secret: str) -> None:
    borrower = SameHostClient(path, secret)
    lent = borrower.take_lease(0)
    mapping = same_host.map_lease(lent, SIZE)
    mapping.view[:4] = b"mine"
    mapping.close()
    borrower.give_back(lent)
    borrower.written(0, [])


def _fork_inside(path: str, secret: str) -> None:
    def fork() -> None:
        if os.fork() == 0:
            SameHostClient(path, secret).close()
            os._exit(0)
        _wait_for_child()

    _standing("received", fork)
    _hand_off(path, secret)


def _fork_and_go_on(path: str, secret: str) -> None:
    child = os.fork()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_hand_off, path, secret).result()
    if child == 0:
        os._exit(0)
    _wait_for_child()


def _wait_for_child() -> None:
    _, status = os.wait()
    assert status == 0


def main() -> None:
    """Do it."""
    path, secret, moment = sys.argv[1:]
    others = {"inside": _fork_inside, "free": _fork_and_go_on}
    if moment in others:
        others[moment](path, secret)
        return
    fork = _Fork()
    _standing(moment, fork.stand)
    thread = threading.Thread(target=_hand_off, args=(path, secret))
    thread.start()
    sys.stdout.write(f"{fork.fork()}\n")
    thread.join()


if __name__ == "__main__":
    main()
