"""Unix sockets to listen on, and servers that know which process is at the other end."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError, invalid_request

#: sun_path of unix(7), less its final zero.
_MAX_PATH = 107
#: Seconds to wait for others that claim a path in the same folder, which takes milliseconds.
_TURN_S = 5.0
#: Between two tries, seconds.
_AGAIN_S = 0.01


@contextlib.contextmanager
def claimed(path: str | Path, remedy: str) -> Iterator[None]:
    """Within the block `path` is free, and nobody else claims it: bind and listen there.

    A socket that nobody listens on is removed; what else is there is refused as REQUEST_INVALID.
    `remedy` is what else one can do, such as "choose another with --listen".
    """
    path = Path(path)
    if len(os.fsencode(path)) > _MAX_PATH:
        raise _refused(
            f"{path} has more than the {_MAX_PATH} bytes of a unix socket; shorten it", remedy
        )
    try:
        # The lock is the folder's own: nothing is left behind, and it ends with its holder.
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        what = f"no unix socket can be made at {path} ({error.strerror}); make its folder"
        raise _refused(what, remedy) from error
    try:
        _wait_turn(folder, path, remedy)
        _free(path, remedy)
        yield
    finally:
        os.close(folder)


def _wait_turn(folder: int, path: Path, remedy: str) -> None:
    end = clock.monotonic() + _TURN_S
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if clock.monotonic() > end:
                what = f"another process keeps the folder of {path} locked; stop it"
                raise _refused(what, remedy) from None
            threading.Event().wait(_AGAIN_S)


def _free(path: Path, remedy: str) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise _refused(f"{path} is not a socket; remove it", remedy)
    if _is_live(path):
        raise _refused(f"another process listens on {path}; stop it", remedy)
    path.unlink(missing_ok=True)


def _is_live(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        # A listener whose queue is full would keep us waiting.
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            # A full queue, no right to connect, another kind of socket: somebody's in any case.
            return True
    return True


@contextlib.contextmanager
def umask(value: int) -> Iterator[None]:
    """Make files within the block without these permissions, in every thread of the process.

    A chmod afterwards would leave a listening socket open to others for a moment.
    """
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


def _refused(what: str, remedy: str) -> WeightSyncError:
    return invalid_request(f"{what} or {remedy}")


_SO_PEERPIDFD = 77
#: From a connection that could not be accepted to the next try, seconds.
_ACCEPT_AGAIN_S = 0.1

#: Connections at once to one server; more are closed unheard.
MOST = 128


def listen(path: Path, mode: int, remedy: str) -> socket.socket:
    """Return a socket that listens at `path`, a `claimed` one, with the permissions `mode`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with claimed(path, remedy):
            listener.bind(str(path))
            # Nobody can connect before it listens, so nobody can with another mode.
            path.chmod(mode)
            # All workers of an engine may come at once; with a full queue they would be refused.
            listener.listen(256)
    except BaseException:
        listener.close()
        raise
    return listener


def accept_each(listener: socket.socket, serve: Callable[[socket.socket], None], name: str) -> None:
    """Serve every connection in a thread of its own; return when the listener is closed.

    `serve` closes its connection. If descriptors or threads are short, whoever connects waits or is
    closed.
    """
    while True:
        try:
            peer, _ = listener.accept()
        except OSError as error:
            if listener.fileno() < 0 or error.errno in (errno.EBADF, errno.EINVAL):
                return
            threading.Event().wait(_ACCEPT_AGAIN_S)
            continue
        try:
            threading.Thread(target=serve, args=(peer,), name=name, daemon=True).start()
        except RuntimeError:
            peer.close()


class PeerCredentials(NamedTuple):
    """The process at the other end, by the kernel's word at the time of its connect."""

    pid: int
    uid: int


class PeerServer:
    """Listens at a `claimed` path until `close`, serving each connection in a thread of its own."""

    def __init__(
        self,
        path: Path,
        mode: int,
        remedy: str,
        serve: Callable[[socket.socket, PeerCredentials], None],
        name: str,
    ) -> None:
        self.path = path
        self._answer = serve
        self._lock = threading.Lock()
        self._peers: set[socket.socket] = set()
        self._socket = listen(path, mode, remedy)
        self._thread = threading.Thread(
            target=accept_each,
            args=(self._socket, self._admit, f"{name}-peer"),
            name=name,
            daemon=True,
        )
        self._thread.start()

    @property
    def connections(self) -> int:
        return len(self._peers)

    def close(self) -> None:
        self.path.unlink(missing_ok=True)
        with self._lock:
            ending = [self._socket, *self._peers]
        for sock in ending:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(timeout=5)

    def _admit(self, peer: socket.socket) -> None:
        with self._lock:
            full = len(self._peers) >= MOST
            if not full:
                self._peers.add(peer)
        try:
            if not full:
                self._answer(peer, _credentials(peer))
        finally:
            with self._lock:
                self._peers.discard(peer)
            peer.close()


def peer_process(peer: socket.socket, who: PeerCredentials) -> int:
    """Return a pidfd of the process at the other end; the caller closes it.

    Raises ProcessLookupError if it has ended, NOT_SUPPORTED if this kernel does not tell which it
    is.
    """
    try:
        found = peer.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except ProcessLookupError:
        # Another one may have its pid by now.
        raise
    except OSError as error:
        # Kernels before 6.5.
        if not who.pid:
            raise WeightSyncError(
                Reason.NOT_SUPPORTED,
                "run the process that connects in the PID namespace of weightsync-server, or "
                "both on Linux 6.5 or newer: it is in another one, and this kernel does not "
                "reveal its id there",
            ) from error
        return os.pidfd_open(who.pid)
    os.set_inheritable(found, False)
    return found


def _credentials(peer: socket.socket) -> PeerCredentials:
    known = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", known)
    return PeerCredentials(pid, uid)
