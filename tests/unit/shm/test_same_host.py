"""What the kernel tells of writers, and the lending socket with real processes at its ends."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.forking_trainer import MOMENTS
from weightsync.errors import Reason, WeightSyncError
from weightsync.shm import same_host
from weightsync.shm.incoming_version import HANDLE_BYTES
from weightsync.shm.same_host import (
    IpcPlacement,
    PeerCredentials,
    SameHostClient,
    SameHostServer,
    WriteLease,
)
from weightsync.shm.segments import Segment, unwritten, writers_are_seen
from weightsync.wire import socket_server

SIZE = 4 << 20


@pytest.fixture
def segment() -> Iterator[Segment]:
    segment = Segment.create(SIZE)
    yield segment
    segment.close()


# Writers.


def test_only_what_was_lent_counts_as_a_writer(segment: Segment) -> None:
    assert writers_are_seen()
    assert segment.taken_back()
    os.close(segment.read_only_fd())
    with mmap.mmap(segment.fd, SIZE) as ours:
        ours[0] = 1
        assert unwritten(segment.fd)


def test_a_descriptor_its_duplicate_and_a_mapping_are_each_seen(segment: Segment) -> None:
    first = segment.lend()
    assert not segment.taken_back()
    second = os.dup(first)
    os.close(first)
    assert not segment.taken_back()
    # Read-only at first, and made writable afterwards.
    mapping = mmap.mmap(second, SIZE, prot=mmap.PROT_READ)
    os.close(second)
    assert not segment.taken_back()
    mapping.close()
    assert segment.taken_back()
    assert not segment.granted


def test_a_descriptor_on_its_way_is_seen(segment: Segment) -> None:
    here, there = socket.socketpair()
    fd = segment.lend()
    socket.send_fds(here, [b"x"], [fd])
    os.close(fd)
    assert not segment.taken_back()
    here.close()
    there.close()
    assert segment.taken_back()


def test_who_opens_it_while_it_is_looked_at_kills_nobody(segment: Segment) -> None:
    code = "import os, sys\nfor _ in range(3000):\n    os.close(os.open(sys.argv[1], os.O_RDWR))\n"
    path = f"/proc/{os.getpid()}/fd/{segment.fd}"
    child = subprocess.Popen([sys.executable, "-c", code, path])
    looks = 0
    while child.poll() is None:
        unwritten(segment.fd)
        looks += 1
    assert child.returncode == 0
    assert looks > 1
    assert unwritten(segment.fd)


# The socket.


class Session:
    """Lends one real segment to whoever knows the secret."""

    def __init__(self, segment: Segment, secret: str, peer: PeerCredentials) -> None:
        self.segment = segment
        self.secret = secret
        self.peer = peer
        self.told: list[tuple[int, bytes]] = []
        self.places: list[list[list[int]]] = []
        self.lie: list[dict[int, dict[str, Any]]] = []
        self.closed = False

    def redeem(self, secret: str) -> None:
        if secret != self.secret:
            raise WeightSyncError(Reason.PERMISSION_DENIED, "this is not the secret; ask again")

    def lend(self, shard: int) -> WriteLease:
        if shard:
            raise WeightSyncError(Reason.SHARD_BUSY, "that one is busy; ask later")
        return WriteLease(self.segment.lend(), self.segment.huge)

    def written(self, shard: int, digests: bytes) -> None:
        self.told.append((shard, digests))

    def collect(self, shard: int, where: dict[str, Any]) -> str:
        self.places.append(where["places"])
        return "there is no GPU" if shard else ""

    def announce_ipc(self, shards: dict[int, dict[str, Any]]) -> None:
        self.lie.append(shards)

    def collected(self, shard: int) -> bytes:
        return bytes([shard] * 16)

    def close(self) -> None:
        self.closed = True


class Office:
    """A lending server and the desks that it opened."""

    def __init__(self, path: Path, segment: Segment, silence_s: float = 20.0) -> None:
        self.secret = secrets.token_hex(8)
        self.sessions: list[Session] = []
        self._segment = segment
        self.server = SameHostServer(path, self.session, silence_s)

    def session(self, peer: PeerCredentials) -> Session:
        self.sessions.append(Session(self._segment, self.secret, peer))
        return self.sessions[-1]

    def gone(self) -> bool:
        deadline = time.monotonic() + 20
        while self.server.connections and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.server.connections == 0 and all(session.closed for session in self.sessions)


@pytest.fixture
def office(tmp_path: Path, segment: Segment) -> Iterator[Office]:
    office = Office(tmp_path / "l.sock", segment)
    yield office
    office.server.close()
    assert not office.server.path.exists()


def test_a_shard_goes_out_and_comes_back(office: Office, segment: Segment) -> None:
    borrower = SameHostClient(office.server.path, office.secret)
    lent = borrower.take_lease(0)
    assert lent.huge is segment.huge
    assert not os.get_inheritable(lent.fd)
    os.pwrite(lent.fd, b"written", 0)
    borrower.give_back(lent)
    # The office closes its own descriptor after it has sent it.
    deadline = time.monotonic() + 20
    while not segment.taken_back() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert segment.taken_back()
    borrower.written(0, [b"\1" * 16, b"\2" * 16])
    assert bytes(segment.view[:7]) == b"written"
    (session,) = office.sessions
    assert session.told == [(0, b"\1" * 16 + b"\2" * 16)]
    assert session.peer == (os.getpid(), os.getuid())
    borrower.close()
    assert office.gone()


def test_a_shard_on_a_gpu_is_told_of_or_declined(office: Office) -> None:
    borrower = SameHostClient(office.server.path, office.secret)
    where = IpcPlacement(b"\7" * 16, b"head", [b"\1" * HANDLE_BYTES], [(0, 4096), (0, 0)])
    assert borrower.collect(0, where) == ""
    assert borrower.collect(1, where) == "there is no GPU"
    assert borrower.collected(0) == bytes(16)
    (session,) = office.sessions
    assert session.places == [[[0, 4096], [0, 0]]] * 2
    borrower.close()
    assert office.gone()


def test_where_shards_lie_is_told_at_once_to_who_knows_that(office: Office) -> None:
    borrower = SameHostClient(office.server.path, office.secret)
    where = IpcPlacement(b"u" * 16, b"header", [b"h" * 64], [(0, 512), (0, 0)])
    borrower.announce_ipc({})
    borrower.announce_ipc({3: where, 7: where})
    borrower._knows = ()
    borrower.announce_ipc({9: where})
    borrower.close()
    told = {"device": "75" * 16, "handles": ["68" * 64], "places": [[0, 512], [0, 0]]}
    assert office.gone()
    assert office.sessions[0].lie == [{3: told, 7: told}]


def test_a_refusal_ends_the_connection(office: Office) -> None:
    with pytest.raises(WeightSyncError, match="not the secret") as told:
        SameHostClient(office.server.path, "other")
    assert told.value.reason is Reason.PERMISSION_DENIED
    borrower = SameHostClient(office.server.path, office.secret)
    with pytest.raises(WeightSyncError, match="busy"):
        borrower.take_lease(1)
    with pytest.raises(OSError, match=r"ended|Broken|reset"):
        borrower.take_lease(0)
    borrower.close()
    assert office.gone()


@pytest.mark.parametrize(
    "first", [b"\xff\xff\xff\xff", b"\2\0\0\0[]", b"\2\0\0\0{}", b'\x0e\0\0\0{"op": "lend"}']
)
def test_what_is_no_request_ends_its_connection_only(office: Office, first: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(office.server.path))
        raw.sendall(first)
        assert raw.recv(10) == b""
    SameHostClient(office.server.path, office.secret).close()
    assert office.gone()


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"op": "lend"},
        {"op": "collect", "shard": "0"},
        {"op": "collect", "shard": True},
        {"op": "collected", "shard": None},
        {"op": "collected", "shard": 0.0},
        {"op": "collected", "shard": [0]},
        {"op": "lying"},
        {"op": "lying", "shards": [{}]},
        {"op": "lying", "shards": {"0": []}},
        {"op": "lying", "shards": {"first": {}}},
        {"op": "written", "shard": 0},
        {"op": "written", "shard": 0, "digests": 7},
        {"op": "written", "shard": 0, "digests": "no"},
        {"op": "take", "shard": 0},
        {"op": ["lend"], "shard": 0},
    ],
)
def test_a_request_that_makes_no_sense_is_answered_with_a_sentence(
    office: Office, request_: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    borrower = SameHostClient(office.server.path, office.secret)
    with pytest.raises(WeightSyncError) as told:
        borrower._ask(request_)
    assert told.value.reason is Reason.REQUEST_INVALID
    assert len(told.value.message) > 20
    borrower.close()
    assert office.gone()
    (session,) = office.sessions
    assert (session.told, session.places, session.lie) == ([], [], [])
    assert not caplog.text


def test_the_silent_are_dropped(
    tmp_path: Path, segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_host, "_REDEEM_S", 0.1)
    office = Office(tmp_path / "l.sock", segment, silence_s=0.1)
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(office.server.path))
        assert raw.recv(10) == b""
    borrower = SameHostClient(office.server.path, office.secret)
    lent = borrower.take_lease(0)
    assert office.gone()
    # The connection is over, but what was lent still is.
    assert not segment.taken_back()
    borrower.give_back(lent)
    borrower.close()
    assert segment.taken_back()
    office.server.close()


def test_a_sign_of_life_keeps_the_connection(tmp_path: Path, segment: Segment) -> None:
    office = Office(tmp_path / "l.sock", segment, silence_s=1.0)
    borrower = SameHostClient(office.server.path, office.secret)
    lent = borrower.take_lease(0)
    for _ in range(8):
        time.sleep(0.25)
        borrower.alive()
    borrower.give_back(lent)
    borrower.written(0, [b"x" * 16])
    assert office.sessions[-1].told == [(0, b"x" * 16)]
    borrower.close()
    assert office.gone()
    office.server.close()


def test_no_thread_for_one_connection_is_no_end_of_all(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as short, socket.socket(socket.AF_UNIX) as raw:
        short.setattr(threading.Thread, "start", none)
        raw.connect(str(office.server.path))
        assert raw.recv(10) == b""
    SameHostClient(office.server.path, office.secret).close()
    assert office.gone()


def test_no_descriptor_for_one_connection_is_no_end_of_all(office: Office) -> None:
    used = max(int(name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208 - names
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[socket.socket] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 3, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(socket.socket(socket.AF_UNIX))
        # It waits: nobody has a descriptor to accept it with.
        held[0].connect(str(office.server.path))
        time.sleep(0.3)
    finally:
        for sock in held:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    SameHostClient(office.server.path, office.secret).close()
    assert office.gone()


def test_too_many_are_turned_away(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_server, "MOST", 2)
    kept = [SameHostClient(office.server.path, office.secret) for _ in range(2)]
    with pytest.raises(OSError, match=r"ended|Broken|reset"):
        SameHostClient(office.server.path, office.secret)
    for borrower in kept:
        borrower.close()
    assert office.gone()


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_child_forked_at_any_moment_is_no_writer_and_no_sign_of_life(
    tmp_path: Path, segment: Segment, moment: str
) -> None:
    office = Office(tmp_path / "l.sock", segment, silence_s=300.0)
    told = forking_trainer(office, moment)
    try:
        assert office.gone()
        assert segment.taken_back()
        assert bytes(segment.view[:4]) == b"mine"
    finally:
        os.kill(int(told), 9)
        office.server.close()


@pytest.mark.parametrize("moment", ["inside", "free"])
def test_a_fork_waits_for_nobody_for_ever(office: Office, segment: Segment, moment: str) -> None:
    forking_trainer(office, moment)
    assert office.gone()
    assert segment.taken_back()


def forking_trainer(office: Office, moment: str) -> bytes:
    """Run a trainer until it ends; return what it printed."""
    module = "tests.support.forking_trainer"
    command = [sys.executable, "-m", module, str(office.server.path), office.secret, moment]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=60).stdout
