"""What is done as long as a trainer has an engine's memory, and for whom nothing is handed out."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.attach_server import HandedOut
from weightsync.wire.peer_server import PeerCredentials
from weightsync_server.attach import attachments
from weightsync_server.attach.attach_metrics import AttachMetrics
from weightsync_server.attach.attachments import Attachment, Attachments
from weightsync_server.ops.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_PEER = PeerCredentials(1, 2)


class _Checks:
    """Counts the comparisons that are asked for."""

    def __init__(self) -> None:
        self.writers: dict[object, str] = {}
        self.owed: list[object] = []

    def owe(self, live: object) -> None:
        self.owed.append(live)


def _made() -> tuple[Attachment, Any, Any, int]:
    checks, session = _Checks(), SimpleNamespace(live="live")
    fd = os.memfd_create("test")
    made: Any = Attachment
    found = HandedOut(1, "c", [[("memory", 0, fd)]])
    return made("e", session, checks, found), session, checks, fd


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


async def _until(true: Callable[[], bool]) -> None:
    for _ in range(2000):
        if true():
            return
        await asyncio.sleep(0.005)
    raise AssertionError


async def test_what_is_live_is_compared_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachments, "CHECK_S", 0.01)
    attachment, session, checks, _ = _made()
    found = attachment.begin()
    assert found is not None
    found.close()
    assert attachment in checks.writers
    await _until(lambda: len(checks.owed) >= 3)
    session.live = None
    count = len(checks.owed)
    await asyncio.sleep(0.05)
    # Of an engine that was started anew nothing is asked for.
    assert len(checks.owed) == count
    with pytest.raises(WeightSyncError, match="started anew"):
        attachment.check()
    attachment.drop()
    assert not checks.writers


async def test_one_comparison_comes_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    attachment, _, checks, fd = _made()
    attachment.begin()
    assert checks.owed == ["live"]
    monkeypatch.setattr(attachments, "CHECK_S", 0.05)
    attachment.end()
    assert checks.owed == ["live", "live"]
    # What that finds is still the trainer's.
    assert attachment in checks.writers
    await _until(lambda: not checks.writers)
    os.close(fd)


async def test_what_was_written_outside_a_transaction_is_said_to_the_trainer() -> None:
    attachment, _, checks, fd = _made()
    attachment.begin()
    attachment.check()
    checks.writers[attachment] = "w was written"
    with pytest.raises(WeightSyncError, match="w was written; attach again") as caught:
        attachment.check()
    assert caught.value.reason is Reason.ENGINE_REFUSED
    attachment.drop()
    os.close(fd)


async def test_what_nobody_fetches_is_closed() -> None:
    attachment, _, checks, fd = _made()
    attachment.expire_in(0.01)
    await _until(lambda: not _is_open(fd))
    assert attachment.begin() is None
    assert not checks.owed


@pytest.fixture
async def those(tmp_path: Path) -> Attachments:
    made: Any = Attachments
    result: Attachments = made(
        SimpleNamespace(), None, tmp_path / "a.sock", AttachMetrics(Metrics("m"))
    )
    return result


@pytest.mark.parametrize("peer", ["ipv4:10.0.0.7:4000", "ipv6:%5B2001:db8::1%5D:4000"])
async def test_other_hosts_get_nothing(those: Attachments, peer: str) -> None:
    with pytest.raises(WeightSyncError, match="on the engine's host alone"):
        await those.offer("", peer)


async def test_of_several_engines_one_must_be_named(tmp_path: Path) -> None:
    engines = [SimpleNamespace(name="a"), SimpleNamespace(name="b")]
    made: Any = Attachments
    those = made(
        SimpleNamespace(named=lambda _: engines),
        None,
        tmp_path / "a.sock",
        AttachMetrics(Metrics("m")),
    )
    with pytest.raises(WeightSyncError, match="name one of a, b"):
        await those.offer("", "unix:")


async def test_a_secret_that_was_never_given_opens_nothing(those: Attachments) -> None:
    with pytest.raises(WeightSyncError, match="opens nothing") as caught:
        await those.redeem("x", _PEER)
    assert caught.value.reason is Reason.PERMISSION_DENIED
