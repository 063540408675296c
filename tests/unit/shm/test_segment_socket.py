from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from weightsync.errors import Reason, WeightSyncError
from weightsync.shm import segment_socket
from weightsync.shm.segment_socket import OfferedFile, SegmentClient, SegmentServer
from weightsync.shm.segments import MappedSegment, Segment
from weightsync.wire.documents import BATCH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def path() -> Iterator[Path]:
    # Not pytest's: every run of it closes that folder to other users.
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "segments.sock"


@pytest.fixture
def server(path: Path) -> Iterator[SegmentServer]:
    made = SegmentServer(path)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def no_leak() -> Iterator[None]:
    before = _open_fds()
    yield
    _until(lambda: len(_open_fds() - before) == 0)


def _open_fds() -> set[str]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        # The descriptor of this very listing is gone by now.
        with contextlib.suppress(OSError):
            found.add(f"{entry.name} {entry.readlink()}")
    return found


def _until(true: Callable[[], bool], timeout_s: float = 10) -> None:
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, _open_fds()
        time.sleep(0.01)


def _file(text: bytes) -> int:
    fd = os.memfd_create("file")
    os.write(fd, text)
    return fd


def _read(fd: int) -> bytes:
    try:
        return os.pread(fd, 1000, 0)
    finally:
        os.close(fd)


def test_more_descriptors_than_one_message_takes(server: SegmentServer, path: Path) -> None:
    count = 2 * BATCH + 5
    names = [f"n{index}" for index in range(count)]
    for index, name in enumerate(names):
        server.publish(name, _file(name.encode()), index)
    with SegmentClient(path) as client:
        received = client.map(names)
        assert [size for _, size in received] == list(range(count))
        assert not any(os.get_inheritable(fd) for fd, _ in received)
        assert [_read(fd).decode() for fd, _ in received] == names
        # The connection goes on.
        assert client.map([]) == []
        ((fd, _),) = client.map(names[:1])
        assert _read(fd) == b"n0"


def test_a_segment_arrives_read_only_and_a_page_writable(server: SegmentServer, path: Path) -> None:
    segment = Segment.create(10)
    segment.view[:5] = b"bytes"
    server.publish(segment.id, segment.read_only_fd(), segment.capacity)
    server.publish("page", os.dup(segment.fd), segment.capacity)
    with SegmentClient(path) as client:
        (fd, size), (page, _) = client.map([segment.id, "page"])
    os.pwrite(page, b"B", 0)
    os.close(page)
    with pytest.raises(OSError):
        os.pwrite(fd, b"x", 0)
    mapped = MappedSegment(fd, size)
    assert bytes(mapped.view[:5]) == b"Bytes"
    mapped.close()
    segment.close()


def test_one_unknown_name_hands_out_nothing(server: SegmentServer, path: Path) -> None:
    server.publish("known", _file(b"known"), 5)
    with SegmentClient(path) as client:
        with pytest.raises(LookupError, match="no segment gone"):
            client.map(["known", "gone"])
        ((fd, _),) = client.map(["known"])
        assert _read(fd) == b"known"


def test_the_same_name_twice_in_one_request(server: SegmentServer, path: Path) -> None:
    server.publish("a", _file(b"a"), 1)
    with SegmentClient(path) as client:
        received = client.map(["a", "a"])
    assert [_read(fd) for fd, _ in received] == [b"a", b"a"]


def test_publishing_a_name_again_replaces_it(server: SegmentServer, path: Path) -> None:
    first = _file(b"first")
    server.publish("a", first, 1)
    server.publish("a", _file(b"second"), 2)
    with pytest.raises(OSError):
        os.fstat(first)
    with SegmentClient(path) as client:
        ((fd, size),) = client.map(["a"])
    assert (_read(fd), size) == (b"second", 2)


def test_withdrawn_is_gone_and_its_descriptor_closed(server: SegmentServer, path: Path) -> None:
    fd = _file(b"a")
    server.publish("a", fd, 1)
    server.withdraw("a")
    server.withdraw("a")
    with pytest.raises(OSError):
        os.fstat(fd)
    with SegmentClient(path) as client, pytest.raises(LookupError):
        client.map(["a"])


def test_many_clients_at_once_while_names_come_and_go(server: SegmentServer, path: Path) -> None:
    server.publish("stays", _file(b"stays"), 5)
    wrong: list[object] = []

    def ask() -> None:
        with SegmentClient(path) as client:
            for _ in range(50):
                ((fd, _),) = client.map(["stays"])
                if (text := _read(fd)) != b"stays":
                    wrong.append(text)
                with contextlib.suppress(LookupError):
                    for fd, _ in client.map(["moves", "stays"]):
                        os.close(fd)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        server.publish("moves", _file(b"moves"), 5)
        server.withdraw("moves")
    assert not wrong


# Garbage.


def _raw(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(10)
    try:
        sock.connect(str(path))
    except OSError:
        sock.close()
        raise
    return sock


def _framed(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def _request(**fields: Any) -> bytes:
    return _framed(json.dumps(fields).encode())


_GARBAGE = {
    "too long": struct.pack("<I", 0xFFFFFFFF),
    "not JSON": _framed(b"\x80\x04pickle"),
    "not UTF-8": _framed(b'"\xff"'),
    "a list": _framed(b"[]"),
    "deep": _framed(b"[" * 100_000),
    "no op": _request(ids=[]),
    "unknown op": _request(op="unlink", path="/etc/passwd"),
    "no ids": _request(op="map"),
    "ids is null": _request(op="map", ids=None),
    "ids is a number": _request(op="map", ids=7),
    "ids of lists": _request(op="map", ids=[["a"], {}]),
    "offer of no writer": _request(op="offer", id="x", files=[]),
    "files is a number": _request(op="offer", id="wanted", files=7),
    "files of numbers": _request(op="offer", id="wanted", files=[1, 2]),
    "size is text": _request(op="offer", id="wanted", files=[["a", "many"]]),
    "size is infinite": _request(op="offer", id="wanted", files=[["a", float("inf")]]),
    "op is a list": _request(op=["map"]),
}


@pytest.mark.parametrize("kind", _GARBAGE)
def test_garbage_ends_one_connection_and_nothing_else(
    server: SegmentServer, path: Path, kind: str
) -> None:
    wanted = server.expect_offer("wanted")
    server.publish("a", _file(b"a"), 1)
    with SegmentClient(path) as good:
        with _raw(path) as bad:
            bad.sendall(_GARBAGE[kind])
            (size,) = struct.unpack("<I", bad.recv(4, socket.MSG_WAITALL))
            assert "error" in json.loads(bad.recv(size, socket.MSG_WAITALL))
        ((fd, _),) = good.map(["a"])
        assert _read(fd) == b"a"
        # A malformed offer takes the place of no good one.
        fd = _file(b"weights")
        good.offer("wanted", [("model", 7, fd)])
        os.close(fd)
    ((_, _, fd),) = wanted.result(timeout=10)
    assert _read(fd) == b"weights"


def test_random_bytes_never_stop_the_server(server: SegmentServer, path: Path) -> None:
    chance = random.Random(0)
    for _ in range(100):
        with _raw(path) as bad, contextlib.suppress(OSError):
            data = chance.randbytes(chance.randrange(40))
            bad.sendall(_framed(data) if chance.random() < 0.5 else data)
    server.publish("a", _file(b"a"), 1)
    with SegmentClient(path) as client:
        ((fd, _),) = client.map(["a"])
    assert _read(fd) == b"a"


def test_a_silent_client_is_dropped(
    server: SegmentServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_socket, "TIMEOUT_S", 0.1)
    with _raw(path) as silent:
        silent.sendall(b"\x10")
        assert silent.recv(1) == b""


def test_a_client_that_reads_nothing_holds_nobody_up(server: SegmentServer, path: Path) -> None:
    server.publish("a", _file(b"a"), 1)
    with _raw(path) as slow:
        slow.sendall(_request(op="map", ids=["a"] * 500) * 50)
        with SegmentClient(path) as client:
            ((fd, _),) = client.map(["a"])
        assert _read(fd) == b"a"


# Offers of a checkpoint.


def test_an_offer_arrives_whole(server: SegmentServer, path: Path) -> None:
    future = server.expect_offer("mine")
    files = [(f"f{index}", index, _file(b"%d" % index)) for index in range(BATCH + 3)]
    with SegmentClient(path) as client:
        client.offer("mine", files)
        with pytest.raises(LookupError, match="no offer mine"):
            client.offer("mine", files)
    offered = future.result(timeout=10)
    assert [(name, size) for name, size, _ in offered] == [(n, s) for n, s, _ in files]
    assert [_read(fd) for _, _, fd in offered] == [b"%d" % index for index in range(len(files))]
    for _, _, fd in files:
        os.close(fd)


_DIE = """
import os, socket, struct, sys, json
sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
sock.connect(sys.argv[1])
data = json.dumps({"op": "offer", "id": "mine", "files": [["a", 1], ["b", 1], ["c", 1]]}).encode()
sock.sendall(struct.pack("<I", len(data)) + data)
(size,) = struct.unpack("<I", sock.recv(4))
sock.recv(size)
fd = os.open("/dev/null", os.O_RDONLY)
if sys.argv[2] == "some":
    socket.send_fds(sock, [b"F"], [fd])
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("sent", ["none", "some"])
def test_a_client_that_dies_in_its_offer(server: SegmentServer, path: Path, sent: str) -> None:
    future = server.expect_offer("mine")
    died = subprocess.run([sys.executable, "-c", _DIE, str(path), sent], check=False, timeout=30)
    assert died.returncode == -9
    with pytest.raises((EOFError, OSError)):
        future.result(timeout=10)


def test_bytes_instead_of_descriptors_fail_the_offer(server: SegmentServer, path: Path) -> None:
    future = server.expect_offer("mine")
    with _raw(path) as bad:
        bad.sendall(_request(op="offer", id="mine", files=[["a", 1]]))
        bad.recv(100)
        bad.sendall(b"F")
        with pytest.raises(EOFError):
            future.result(timeout=10)


def test_an_offer_that_nobody_waits_for_any_more(server: SegmentServer, path: Path) -> None:
    future = server.expect_offer("mine")
    assert future.cancel()
    fd = _file(b"x")
    with SegmentClient(path) as client, pytest.raises(LookupError):
        client.offer("mine", [("a", 1, fd)])
    os.close(fd)


def test_an_offer_given_up_while_it_comes_in(server: SegmentServer, path: Path) -> None:
    future: Future[list[OfferedFile]] = server.expect_offer("mine")
    fd = _file(b"x")
    with _raw(path) as client:
        client.sendall(_request(op="offer", id="mine", files=[["a", 1]]))
        client.recv(100)
        assert future.cancel()
        socket.send_fds(client, [b"F"], [fd])
        client.sendall(_request(op="map", ids=[]))
        assert b"sizes" in client.recv(100), "the connection goes on"
    os.close(fd)
    with pytest.raises(CancelledError):
        future.result(timeout=0)


# The socket file.


@pytest.mark.parametrize("mode", [0o660, 0o600])
def test_only_owner_and_group_may_connect(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "s"
    old = os.umask(0)
    try:
        server = SegmentServer(path) if mode == 0o660 else SegmentServer(path, mode)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    server.close()
    assert not path.exists()


def test_it_has_its_mode_before_anybody_can_connect(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    class Watched(socket.socket):
        def listen(self, *queue: int) -> None:
            seen.append(stat.S_IMODE(path.stat().st_mode))
            with socket.socket(socket.AF_UNIX) as early, pytest.raises(ConnectionRefusedError):
                early.connect(str(path))
            super().listen(*queue)

    monkeypatch.setattr(socket, "socket", Watched)
    old = os.umask(0)
    try:
        server = SegmentServer(path)
    finally:
        os.umask(old)
    server.close()
    assert seen == [0o660]


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_is_kept_out(server: SegmentServer, path: Path) -> None:
    path.parent.chmod(0o755)
    program = (
        "import os, socket, sys\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "os.stat(sys.argv[1])\n"
        "try:\n"
        "    socket.socket(socket.AF_UNIX).connect(sys.argv[1])\n"
        "except PermissionError:\n"
        "    sys.exit(0)\n"
        "sys.exit('connected')\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], check=False, timeout=30)
    assert done.returncode == 0


def test_a_stale_socket_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    server = SegmentServer(path)
    with SegmentClient(path) as client:
        assert client.map([]) == []
    server.close()


def test_a_live_socket_is_refused(server: SegmentServer, path: Path) -> None:
    with pytest.raises(WeightSyncError, match=r"another process listens.*--run-dir") as caught:
        SegmentServer(path)
    assert caught.value.reason is Reason.REQUEST_INVALID
    with SegmentClient(path) as client:
        assert client.map([]) == []


def test_a_file_that_is_no_socket_is_left_alone(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(WeightSyncError, match="is not a socket"):
        SegmentServer(path)
    assert path.read_text() == "precious"


def test_a_folder_that_is_missing_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match="make its folder"):
        SegmentServer(tmp_path / "missing" / "s")


def test_nobody_listens(path: Path) -> None:
    with pytest.raises(OSError):
        SegmentClient(path)


def test_close_ends_it(path: Path) -> None:
    server = SegmentServer(path)
    fd = _file(b"a")
    server.publish("a", fd, 1)
    server.close()
    with pytest.raises(OSError):
        os.fstat(fd)
    with pytest.raises(OSError):
        SegmentClient(path)


def test_descriptors_that_a_process_may_not_have_are_not_waited_for() -> None:
    """Nor kept: the kernel has handed over some of them."""
    program = (
        "import os, resource, socket\n"
        "from weightsync.wire.documents import receive_fds, send_fds\n"
        "here, there = socket.socketpair()\n"
        "here.settimeout(20)\n"
        "send_fds(there, [0] * 5)\n"
        "before = sorted(os.listdir('/proc/self/fd'))\n"
        "_, most = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (there.fileno() + 3, most))\n"
        "try:\n"
        "    receive_fds(here, 5)\n"
        "except OSError as error:\n"
        "    print(repr(error))\n"
        "assert sorted(os.listdir('/proc/self/fd')) == before\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "OSError(24, 'Too many open files')\n"
