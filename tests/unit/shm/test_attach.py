"""The attach socket with real descriptors: what is handed over, to whom, and until when."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from typing import TYPE_CHECKING

import pytest

from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.attach_socket import AttachClient, AttachServer, HandedOut
from weightsync.shm.live_views import DOCUMENT, GATE, HANDLES, MEMORY, LiveBox, LiveViews
from weightsync.shm.live_writers import LiveWriters
from weightsync.shm.segments import Segment, unwritten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_BOX = LiveBox("w", "F32", "BF16", (4, 2), (2, 0), (2, 2), (2, 1), 0, 64)
_VIEWS = LiveViews("0/0/0", b"", "m", {"layers": 1}, (_BOX,))


class _Session:
    """Hands one segment, and two handles, to who has the secret."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.ended = 0
        self.refusal: WeightSyncError | None = None

    def redeem(self, secret: str, pidfd: int) -> HandedOut:
        os.fstat(pidfd)
        if secret != "good":
            raise WeightSyncError(Reason.PERMISSION_DENIED, "opens nothing")
        files = []
        for name, data in ((DOCUMENT, _VIEWS.to_json()), (HANDLES, bytes(128))):
            fd = os.memfd_create(name)
            os.pwrite(fd, data, 0)
            files.append((name, len(data), fd))
        files.append((MEMORY, self.segment.capacity, self.segment.lend()))
        return HandedOut(7, "c" * 32, [files])

    def write(self, transaction: str) -> HandedOut:
        raise WeightSyncError(Reason.APPLY_RESTORED, f"{transaction} is not open")

    def check(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    def close(self) -> None:
        self.ended += 1


@pytest.fixture
def session(tmp_path: Path) -> Iterator[_Session]:
    segment = Segment.create(4096)
    made = _Session(segment)
    server = AttachServer(tmp_path / "a.sock", lambda _: made)
    yield made
    server.close()
    segment.close()


def _until(true: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def _until_ended(session: _Session) -> None:
    _until(lambda: session.ended)


def test_who_has_the_secret_gets_memory_to_write(session: _Session, tmp_path: Path) -> None:
    client = AttachClient(tmp_path / "a.sock", "good")
    (rank,) = client.ranks
    assert (client.version, client.content_digest) == (7, "c" * 32)
    assert rank.views == _VIEWS
    assert rank.handles == (bytes(64), bytes(64))
    rank.mappings[0].view[64] = 42
    assert session.segment.view[64] == 42
    client.check()
    assert not unwritten(session.segment.fd)
    client.close()
    _until_ended(session)
    # The server kept none of the descriptors that it sent, nor did the client.
    rank.mappings[0].close()
    assert unwritten(session.segment.fd)


def test_the_socket_is_its_user_s_alone(session: _Session, tmp_path: Path) -> None:
    del session
    assert stat.S_IMODE((tmp_path / "a.sock").stat().st_mode) == 0o600


def test_another_user_is_refused_whatever_it_has(
    session: _Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(WeightSyncError, match="may not write what user") as caught:
        AttachClient(tmp_path / "a.sock", "good")
    assert caught.value.reason is Reason.PERMISSION_DENIED
    assert unwritten(session.segment.fd)


def test_a_wrong_secret_opens_nothing(session: _Session, tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match="opens nothing"):
        AttachClient(tmp_path / "a.sock", "bad")
    _until_ended(session)
    assert unwritten(session.segment.fd)


def test_a_check_that_fails_ends_the_attachment(session: _Session, tmp_path: Path) -> None:
    client = AttachClient(tmp_path / "a.sock", "good")
    session.refusal = WeightSyncError(Reason.ENGINE_AWAY, "started anew")
    with pytest.raises(WeightSyncError, match="started anew"):
        client.check()
    with pytest.raises(ConnectionError):
        client.check()
    client.close()


def test_views_are_read_as_they_were_written_and_others_are_refused() -> None:
    assert LiveViews.from_json(_VIEWS.to_json()) == _VIEWS
    for wrong in (b"{}", b"[]", b'{"rank": "0", "device": "", "boxes": 3}'):
        with pytest.raises(ValueError, match=r"unknown format|indices"):
            LiveViews.from_json(wrong)


class _Guarded(_Session):
    """Hands out what is written in blocks alone, with a gate; on a GPU no memory of the host."""

    def __init__(self, segment: Segment, *, on_gpu: bool) -> None:
        super().__init__(segment)
        self.writers = LiveWriters(tuple)
        self._on_gpu = on_gpu

    def redeem(self, secret: str, pidfd: int) -> HandedOut:
        found = super().redeem(secret, pidfd)
        (files,) = found.ranks
        os.close(files[-1][-1])
        kept = [*files[:-1], (MEMORY, self.segment.capacity, self.segment.read_only_fd())]
        if self._on_gpu:
            os.close(kept.pop()[-1])
        return found._replace(ranks=[kept], guarded=True)

    def write(self, transaction: str) -> HandedOut:
        del transaction
        files = [(GATE, 0, self.writers.gate())]
        if not self._on_gpu:
            files.append((MEMORY, self.segment.capacity, self.segment.lend()))
        return HandedOut(7, "c", [files])

    @property
    def is_written(self) -> bool:
        return bool(self.writers.state()["writing"]) or not unwritten(self.segment.fd)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_block_that_has_ended_is_let_go_of_on_a_gpu_when_nobody_writes(
    tmp_path: Path, *, on_gpu: bool
) -> None:
    segment = Segment.create(4096)
    session = _Guarded(segment, on_gpu=on_gpu)
    server = AttachServer(tmp_path / "a.sock", lambda _: session)
    client = AttachClient(tmp_path / "a.sock", "good")
    client.open_block("t")
    assert session.is_written
    client.revoke_block()
    if on_gpu:
        # What is queued there cannot be kept from it.
        time.sleep(0.2)
        assert session.is_written
    _until(lambda: session.is_written == on_gpu)
    client.revoke_block(settled=True)
    # The server closes what it has sent a moment later.
    _until(lambda: not session.is_written)
    # Of the host it is a copy of its own.
    assert client.writable != on_gpu
    client.close_block()
    client.close()
    server.close()
    segment.close()


def test_a_child_that_is_forked_while_its_parent_asks_waits_for_nobody(
    session: _Session, tmp_path: Path
) -> None:
    client = AttachClient(tmp_path / "a.sock", "good")
    asked, may_answer = threading.Event(), threading.Event()

    def wait() -> None:
        asked.set()
        may_answer.wait(20)

    session.check = wait  # type: ignore[method-assign]
    asking = threading.Thread(target=client.check)
    asking.start()
    assert asked.wait(10)
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)
        try:
            client.check()
        except OSError:
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    may_answer.set()
    asking.join()
    client.close()
    assert os.waitstatus_to_exitcode(status) == 0
