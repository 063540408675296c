"""A path to listen on is taken over from the dead alone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from weightsync.errors import Reason, WeightSyncError
from weightsync.wire import socket_server
from weightsync.wire.socket_server import claimed, umask

if TYPE_CHECKING:
    from collections.abc import Iterator

REMEDY = "choose another with --listen"


@pytest.fixture
def path() -> Iterator[Path]:
    # Not pytest's: every run of it closes that folder to other users.
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "a.sock"


@contextlib.contextmanager
def _bound(path: Path, kind: int = socket.SOCK_STREAM) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, kind) as bound:
        bound.bind(str(path))
        yield bound


def _refusal(path: Path) -> str:
    before = path.lstat() if path.is_symlink() or path.exists() else None
    with pytest.raises(WeightSyncError) as caught, claimed(path, REMEDY):
        pytest.fail("claimed")
    assert caught.value.reason is Reason.REQUEST_INVALID
    assert str(path) in caught.value.message
    assert caught.value.message.endswith(f" or {REMEDY}")
    if before is not None:
        assert path.lstat().st_ino == before.st_ino, "what is there stays"
    return caught.value.message


def test_a_path_where_nothing_is(path: Path) -> None:
    with claimed(path, REMEDY), _bound(path):
        pass
    assert os.listdir(path.parent) == [path.name]  # noqa: PTH208 - names are what is wanted


def test_a_socket_of_the_dead_is_removed(path: Path) -> None:
    with _bound(path) as listener:
        listener.listen()
    with claimed(path, REMEDY):
        assert not path.exists()


def test_a_live_listener_is_left_alone(path: Path) -> None:
    with _bound(path) as listener:
        listener.listen()
        assert "another process listens on" in _refusal(path)
        listener.accept()[0].close()


def test_a_listener_that_accepts_nobody_lives(path: Path) -> None:
    with _bound(path) as listener, contextlib.ExitStack() as stack:
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(str(path))
        begun = time.monotonic()
        assert "another process listens on" in _refusal(path)
        # To connect would take for ever.
        assert time.monotonic() - begun < 20


def test_a_socket_of_another_kind_lives(path: Path) -> None:
    with _bound(path, socket.SOCK_DGRAM):
        assert "another process listens on" in _refusal(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_listener_that_does_not_let_us_in_lives(path: Path) -> None:
    path.parent.chmod(0o755)
    with _bound(path) as listener:
        path.chmod(0o600)
        listener.listen()
        os.seteuid(65534)
        try:
            assert "another process listens on" in _refusal(path)
        finally:
            os.seteuid(0)


@pytest.mark.parametrize("kind", ["file", "folder", "link", "broken link"])
def test_what_is_no_socket_is_left_alone(path: Path, kind: str) -> None:
    other = path.with_name("other")
    if kind == "file":
        path.write_text("precious")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(other)
    with _bound(other) if kind == "link" else contextlib.nullcontext():
        assert "is not a socket; remove it" in _refusal(path)


def test_a_folder_that_is_missing_is_named(path: Path) -> None:
    assert "make its folder" in _refusal(path.parent / "missing" / "a.sock")


def test_a_path_that_is_too_long_is_named(path: Path) -> None:
    assert "107 bytes" in _refusal(path.with_name("x" * 107))


def test_of_two_that_come_at_once_one_gets_it(path: Path) -> None:
    with _bound(path):
        pass
    outcomes: list[str] = []
    together = threading.Barrier(8)
    made = []

    def take() -> None:
        together.wait()
        try:
            with claimed(path, REMEDY):
                listener = socket.socket(socket.AF_UNIX)
                made.append(listener)
                listener.bind(str(path))
                # Bound and not listening it looks like one of the dead.
                time.sleep(0.02)
                listener.listen()
        except WeightSyncError as error:
            outcomes.append(error.message)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for listener in made:
        listener.close()
    assert len(made) == 1
    assert len(outcomes) == 7
    assert all("another process listens on" in outcome for outcome in outcomes)


def test_a_folder_that_stays_locked_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_server, "_TURN_S", 0.1)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        assert "keeps the folder of" in _refusal(path)
    finally:
        os.close(folder)


def test_nothing_stays_open(path: Path) -> None:
    before = os.listdir("/proc/self/fd")  # noqa: PTH208 - names are what is wanted
    with claimed(path, REMEDY), _bound(path) as listener:
        listener.listen()
    with _bound(path.with_name("b.sock")) as listener:
        listener.listen()
        _refusal(path.with_name("b.sock"))
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208


def test_the_umask_comes_back(path: Path) -> None:
    before = os.umask(0)
    try:
        with umask(0o117), _bound(path):
            assert path.stat().st_mode & 0o777 == 0o660
        with pytest.raises(OSError), umask(0o117), _bound(path):
            pytest.fail("bound twice")
        assert os.umask(0) == 0
    finally:
        os.umask(before)
