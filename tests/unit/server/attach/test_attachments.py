"""What is done as long as a trainer has an engine's memory, and for whom nothing is handed out."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.open_files import open_files, opened_since
from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.attach_socket import HandedOut
from weightsync.shm.live_views import HANDLES
from weightsync.v1 import attach_pb2 as pb
from weightsync.wire.socket_server import PeerCredentials
from weightsync_server.attach import attachments
from weightsync_server.attach.attachments import (
    MOST_OFFERS,
    Attachment,
    Attachments,
    AttachSession,
    OpenBlocks,
)
from weightsync_server.attach.in_place import InPlace
from weightsync_server.engine.live_check import QuarantinedLeases
from weightsync_server.engine.worker_reports import RankState, read_report, read_state
from weightsync_server.ops.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

_PEER = PeerCredentials(1, 2)


class _Checks:
    """Counts the comparisons that are asked for."""

    def __init__(self) -> None:
        self.writers: dict[object, str] = {}
        self.owed: list[object] = []
        self.watched = False

    def watch(self) -> None:
        self.watched = True

    def owe(self, live: object) -> None:
        self.owed.append(live)

    def break_off(self, why: str, writer: object) -> None:
        """Nobody writes in a block here."""

    def writing(self, *_: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


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


async def test_who_has_the_memory_is_watched() -> None:
    attachment, session, checks, fd = _made()
    found = attachment.take()
    assert found is not None
    assert found.attachment == attachment.token
    attachment.begin()
    assert checks.watched
    assert attachment in checks.writers
    session.live = None
    attachment.begin()
    # Of an engine that was started anew nothing is asked for.
    assert checks.owed == ["live"]
    with pytest.raises(WeightSyncError, match="the engine restarted"):
        attachment.check()
    attachment.drop()
    assert not checks.writers
    os.close(fd)


async def test_one_comparison_comes_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    attachment, _, checks, _ = _made()
    attachment.begin()
    assert checks.owed == ["live"]
    monkeypatch.setattr(attachments, "CHECK_S", 0.05)
    attachment.end()
    assert checks.owed == ["live", "live"]
    # What that finds is still the trainer's.
    assert attachment in checks.writers
    await _until(lambda: not checks.writers)


async def test_what_was_written_outside_a_transaction_is_said_to_the_trainer() -> None:
    attachment, _, checks, _ = _made()
    attachment.begin()
    attachment.check()
    checks.writers[attachment] = "w was written"
    with pytest.raises(WeightSyncError, match="w was written; attach again") as caught:
        attachment.check()
    assert caught.value.reason is Reason.ENGINE_REFUSED
    attachment.drop()


async def test_what_nobody_fetches_is_closed() -> None:
    attachment, _, checks, fd = _made()
    attachment.expire_in(0.01)
    await _until(lambda: not _is_open(fd))
    assert attachment.take() is None
    assert not checks.owed


@pytest.fixture
async def those(tmp_path: Path) -> Attachments:
    made: Any = Attachments
    result: Attachments = made(SimpleNamespace(), tmp_path / "a.sock", Metrics("m"))
    return result


@pytest.mark.parametrize("peer", ["ipv4:10.0.0.7:4000", "ipv6:%5B2001:db8::1%5D:4000"])
async def test_other_hosts_get_nothing(those: Attachments, peer: str) -> None:
    with pytest.raises(WeightSyncError, match="memory is shared only on that host"):
        await those.offer(pb.AttachRequest(), peer)


async def test_of_several_engines_one_must_be_named(tmp_path: Path) -> None:
    engines = [SimpleNamespace(name="a"), SimpleNamespace(name="b")]
    made: Any = Attachments
    those = made(
        SimpleNamespace(named=lambda _: engines),
        tmp_path / "a.sock",
        Metrics("m"),
    )
    with pytest.raises(WeightSyncError, match="name one of a, b"):
        await those.offer(pb.AttachRequest(), "unix:")


@pytest.mark.parametrize("job", ["x" * 65, "a\nb"])
async def test_a_job_is_a_short_word(those: Attachments, job: str) -> None:
    with pytest.raises(WeightSyncError, match="at most 64 printable") as caught:
        await those.offer(pb.AttachRequest(job=job), "unix:")
    assert caught.value.reason is Reason.REQUEST_INVALID


async def test_offers_that_nobody_fetches_are_bounded(those: Attachments) -> None:
    waiting: Any = dict.fromkeys(map(str, range(MOST_OFFERS)))
    those._offers = waiting
    with pytest.raises(WeightSyncError, match="64 offers are still unused") as caught:
        await those.offer(pb.AttachRequest(), "unix:")
    assert caught.value.reason is Reason.LIMIT_EXCEEDED
    assert caught.value.retry_after_s


async def test_offers_that_are_made_at_once_are_bounded(host: _Host) -> None:
    offers = [host.offer("a") for _ in range(MOST_OFFERS + 3)]
    made = await asyncio.gather(*offers, return_exceptions=True)
    refused = [each for each in made if not isinstance(each, str)]
    assert len(host.all._offers) == MOST_OFFERS
    assert len(refused) == 3
    for each in refused:
        assert isinstance(each, WeightSyncError)
        assert each.reason is Reason.LIMIT_EXCEEDED
    host.all._close()


@pytest.mark.parametrize(("peer", "token"), [("unix:", "other"), ("ipv4:10.0.0.7:4000", "")])
async def test_who_is_not_attached_writes_nothing(
    those: Attachments, peer: str, token: str
) -> None:
    attachment, _, _, fd = _made()
    those._open.add(attachment)
    assert those.writer("e", attachment.token, "unix:") is attachment
    with pytest.raises(WeightSyncError, match="attach before you begin") as caught:
        those.writer("e", token or attachment.token, peer)
    assert caught.value.reason is Reason.ENGINE_REFUSED
    os.close(fd)


@pytest.fixture
async def stale(those: Attachments) -> Attachment:
    """An attachment of job a to an earlier start of the engine."""
    return _attached(those, "a", "before", live=None)


def _attached(those: Attachments, job: str, start: str, live: str | None = "live") -> Attachment:
    made: Any = Attachment
    session = SimpleNamespace(live=live)
    attachment: Attachment = made("e", session, _Checks(), HandedOut(1, "c", []), job)
    attachment.engine_id = start
    those._open.add(attachment)
    return attachment


async def test_who_wrote_an_engine_of_before_keeps_no_other_job_from_the_new_one(
    those: Attachments, stale: Attachment
) -> None:
    assert those.writer("e", stale.token, "unix:") is stale
    writer = _attached(those, "b", "now")
    assert those.writer("e", writer.token, "unix:") is writer


async def test_memory_of_before_lets_no_second_job_write_the_new_engine(
    those: Attachments, stale: Attachment
) -> None:
    writer, other = _attached(those, "b", "now"), _attached(those, "c", "now")
    assert those.writer("e", writer.token, "unix:") is writer
    # It begins nothing there, which the transaction itself finds.
    assert those.writer("e", stale.token, "unix:") is stale
    with pytest.raises(WeightSyncError, match="only one job at a time may"):
        those.writer("e", other.token, "unix:")
    await those.leave(writer, _PEER)
    assert those.writer("e", other.token, "unix:") is other


async def test_of_an_older_release_what_is_live_is_written(those: Attachments) -> None:
    """It does not say by which attachment."""
    for number in range(20):
        _attached(those, "", f"before {number}", live=None)
    writer = _attached(those, "", "now")
    assert those.writer("e", "", "unix:") is writer


class _Host:
    """An engine whose ranks tell what a test says, and who is given its memory.

    Attributes:
        holders: Who can always write it, each with its job.
        current: The session of the engine that is here now.
        remembering: Set: the ranks remember.
        handing_out: Whether they were asked for their memory.
        handed_out: Set: they hand it out.
        lost: Whether what they say is lost on its way.
        suspected: Whether the engine would be asked for what it holds.
    """

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.holders: list[tuple[int, str]] = []
        self.guarded: tuple[int, ...] = ()
        self.answered = True
        self.suspected = False
        self.remembering = asyncio.Event()
        self.remembering.set()
        self.handed_out = asyncio.Event()
        self.handed_out.set()
        self.handing_out = self.lost = False
        self.current = self.session()
        supervisor = SimpleNamespace(exclusive=self._exclusive, checks=_Checks())
        applier = SimpleNamespace(name="e", supervisor=supervisor)
        engines: Any = SimpleNamespace(named=lambda _: [applier])
        metrics, socket = Metrics("m"), path / "a.sock"
        made: Any = Attachments
        self.all: Attachments = made(engines, socket, metrics)
        monkeypatch.setattr(attachments, "live_version", lambda _: "live")
        monkeypatch.setattr(attachments, "check_attachable", lambda _: None)
        monkeypatch.setattr(attachments, "hand_out", self._hand_out)
        monkeypatch.setattr(attachments, "remember", self._remember)

    def session(self) -> Any:
        return SimpleNamespace(
            live="live", states=self.states, info=SimpleNamespace(engine_id="id")
        )

    async def states(self) -> list[RankState]:
        holders = tuple(sorted({pid for pid, _ in self.holders} | {*self.guarded}))
        found = tuple(self.holders)
        if not self.answered:
            return [read_state("0/0/0", {"ok": False})]
        return [RankState("0/0/0", "", dirty=False, holders=holders, unguarded_by=found)]

    async def offer(self, job: str) -> str:
        return (await self.all.offer(pb.AttachRequest(job=job), "unix:")).secret

    async def attach(self, job: str, pid: int) -> Attachment:
        attachment, found = await self.redeem(await self.offer(job), pid)
        found.close()
        return attachment

    async def redeem(self, secret: str, pid: int) -> tuple[Attachment, HandedOut]:
        return await self.all.redeem(secret, PeerCredentials(pid, 2), -1)

    @contextlib.asynccontextmanager
    async def _exclusive(
        self, *_: object, only_asks: bool = False, **__: object
    ) -> AsyncIterator[Any]:
        try:
            yield self.current
        except BaseException as error:
            ranks: Any = SimpleNamespace(may_write=False)
            unknown = QuarantinedLeases.outcome_unknown(ranks, error)
            self.suspected |= unknown and not only_asks
            raise

    async def _hand_out(self, *_: object) -> HandedOut:
        self.handing_out = True
        await self.handed_out.wait()
        await asyncio.sleep(0)
        if self.lost:
            raise WeightSyncError(Reason.ENGINE_AWAY, "it did not arrive")
        fd = os.memfd_create("test")
        return HandedOut(1, "c", [[(HANDLES, 0, fd)]])

    async def _remember(self, *args: Any, always: bool) -> None:
        del always
        _, _, pid, _, job = args
        await self.remembering.wait()
        if self.lost:
            raise WeightSyncError(Reason.ENGINE_AWAY, "the answer was lost")
        self.holders = [each for each in self.holders if each[0] != pid] + [(pid, job)]


@pytest.fixture
async def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Host:
    return _Host(tmp_path, monkeypatch)


async def test_who_can_always_write_by_the_ranks_word_keeps_out_another_job(host: _Host) -> None:
    """A server before this one has given it the memory."""
    host.holders = [(7, "a")]
    with pytest.raises(WeightSyncError, match="end process 7, then try again") as caught:
        await host.offer("b")
    assert caught.value.reason is Reason.ENGINE_REFUSED
    secret = await host.offer("a")
    host.holders = [(9, "c")]
    with pytest.raises(WeightSyncError, match="end process 9, then try again"):
        await host.redeem(secret, 8)
    host.holders = [(7, "a")]
    assert (await host.attach("a", 8)).pid == 8
    host.holders = []
    assert not host.suspected


async def test_who_was_given_memory_here_and_has_left_keeps_out_nobody(host: _Host) -> None:
    attachment = await host.attach("a", 7)
    with pytest.raises(WeightSyncError, match="end process 7 or close its attachment"):
        await host.offer("b")
    await host.all.leave(attachment, PeerCredentials(7, 2))
    assert host.holders == [(7, "a")]
    assert (await host.attach("b", 8)).pid == 8


async def test_who_comes_with_a_secret_keeps_out_another_job_at_once(host: _Host) -> None:
    """Also while the ranks are told of it."""
    host.remembering.clear()
    attaching = asyncio.create_task(host.attach("a", 7))
    await _until(lambda: bool(host.all._redeeming))
    with pytest.raises(WeightSyncError, match="end process 7 or close its attachment"):
        await host.offer("b")
    host.remembering.set()
    assert (await attaching).pid == 7
    assert not host.all._redeeming


async def test_who_was_not_given_the_memory_keeps_out_nobody(host: _Host) -> None:
    secret = await host.offer("a")
    host.current = host.session()
    with pytest.raises(WeightSyncError, match="attach again: the engine restarted meanwhile"):
        await host.redeem(secret, 7)
    assert not host.suspected, "nothing is known to be wrong with the engine that is here"
    assert (await host.attach("b", 8)).pid == 8


async def test_a_trainer_that_gives_up_says_nothing_of_the_engine(host: _Host) -> None:
    host.handed_out.clear()
    asking = asyncio.create_task(host.offer("a"))
    await _until(lambda: host.handing_out)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert not host.suspected
    host.handed_out.set()
    assert (await host.attach("b", 8)).pid == 8


async def test_memory_that_does_not_arrive_says_nothing_of_the_engine(host: _Host) -> None:
    secret = await host.offer("a")
    host.lost = True
    with pytest.raises(WeightSyncError, match="it did not arrive"):
        await host.offer("a")
    with pytest.raises(WeightSyncError, match="the answer was lost"):
        await host.redeem(secret, 7)
    assert not host.suspected


async def test_a_transaction_in_memory_of_before_says_nothing_of_the_engine_that_is_here(
    host: _Host,
) -> None:
    attachment = await host.attach("a", 7)
    attachment.engine_id = "before"
    made: Any = InPlace
    applier = host.all.engine("e")
    parts = SimpleNamespace(fleet=""), OpenBlocks(), SimpleNamespace()
    line = SimpleNamespace(break_off=print)
    transaction = made(applier, *parts, line, attachment, None)
    with pytest.raises(WeightSyncError, match="attach again: the engine restarted") as caught:
        await transaction.run()
    assert caught.value.reason is Reason.ENGINE_AWAY
    assert not host.suspected


@pytest.mark.parametrize("says", [{}, {"holders": [7], "unguarded": True}, {"holders": [7]}])
async def test_what_anybody_could_write_before_a_block_is_compared(
    host: _Host, says: dict[str, Any]
) -> None:
    """Ranks of older releases know nobody, and guard nothing."""
    made: Any = InPlace
    violated: list[str] = []
    limits = SimpleNamespace(commit_timeout_s=1.0)
    shared = SimpleNamespace(metrics=SimpleNamespace(violate=violated.append), limits=limits)
    parts = shared, OpenBlocks(), None
    transaction = made(host.all.engine("e"), *parts, None, None, None)
    differs = {"ticket": "t", "phase": "ready", "proved": False, "mismatched": ["b"]}

    async def states() -> list[RankState]:
        return [read_state("0/0/0", {"ok": True, "content_digest": "d", "dirty": False} | says)]

    async def verify(*_: object, quick: bool) -> list[Any]:
        assert quick
        return [read_report("0/0/0", "t", differs)]

    session: Any = SimpleNamespace(states=states, ranks=SimpleNamespace(verify=verify))
    base: Any = SimpleNamespace(apply_id="a", record=SimpleNamespace(version=1))
    await transaction._check_writers(session)
    anybody = says != {"holders": [7]}
    differ = pytest.raises(WeightSyncError, match="holds something else of b than version 1")
    with differ if anybody else contextlib.nullcontext():
        await transaction._check_base(session, base)
    assert violated == (["never_mixed"] if anybody else [])


async def test_where_a_rank_does_not_answer_nothing_is_handed_out(host: _Host) -> None:
    host.answered = False
    with pytest.raises(WeightSyncError, match="rank 0/0/0 does not report who can write") as caught:
        await host.offer("a")
    assert caught.value.reason is Reason.ENGINE_REFUSED


async def test_ranks_that_know_no_job_keep_out_nobody(host: _Host) -> None:
    host.guarded = (7,)
    assert (await host.attach("b", 8)).pid == 8


def _in_memory(count: int) -> HandedOut:
    files = [("memory", 0, os.memfd_create("attached")) for _ in range(count)]
    return HandedOut(1, "c", [files])


async def test_a_block_is_for_who_has_this_start_of_this_engine() -> None:
    """The ranks of another one have never heard of it."""

    def attachment(engine: str, start: str, job: str = "j") -> Attachment:
        made: Any = Attachment
        one: Attachment = made(engine, None, _Checks(), HandedOut(1, "c", []), job)
        one.engine_id = start
        return one

    blocks = OpenBlocks()
    blocks.keep("t", attachment("e", "now"), _in_memory(1))
    with pytest.raises(WeightSyncError, match="transaction t is not open"):
        blocks.take("t", attachment("e", "now"))
    blocks.open("t")
    for engine, start in (("another", "now"), ("e", "before")):
        with pytest.raises(WeightSyncError, match="attach to engine e again") as caught:
            blocks.take("t", attachment(engine, start))
        assert caught.value.reason is Reason.ENGINE_REFUSED
    with pytest.raises(WeightSyncError, match="only one job at a time may"):
        blocks.take("t", attachment("e", "now", "another"))
    blocks.take("t", attachment("e", "now")).close()
    blocks.close("t")
    with pytest.raises(WeightSyncError, match="transaction t is not open"):
        blocks.take("t", attachment("e", "now"))


async def test_what_is_handed_out_in_part_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ranks would take the server itself for one that can still write."""
    given = _in_memory(3)

    @contextlib.asynccontextmanager
    async def offered(*_: object) -> AsyncIterator[Any]:
        yield given.ranks

    monkeypatch.setattr(attachments, "offered_by_each", offered)
    monkeypatch.setattr(os, "dup", _short(os.dup, 2))
    context = SimpleNamespace(segments=None)
    session: Any = SimpleNamespace(info=SimpleNamespace(ranks=("0",)), context=context)
    live: Any = SimpleNamespace(record=SimpleNamespace(version=1), digest="c")
    before = open_files()
    with pytest.raises(OSError, match="Too many open files"):
        await attachments.hand_out(session, live, "write")
    assert opened_since(before) == []
    given.close()


def _short(call: Callable[[int], int], left: int) -> Callable[[int], int]:
    """Return a call that finds no descriptor left after so many."""
    each = iter(range(left))

    def short(fd: int) -> int:
        if next(each, None) is None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return call(fd)

    return short


async def test_a_server_that_is_short_of_descriptors_says_so(
    those: Attachments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And goes on with who is attached."""
    attachment, _, _, fd = _made()
    those.blocks.keep("t", attachment, _in_memory(1))
    those.blocks.open("t")
    session = AttachSession(those, asyncio.get_running_loop(), _PEER)
    session._attachment = attachment
    with monkeypatch.context() as patch:
        patch.setattr(os, "dup", _short(os.dup, 0))
        with pytest.raises(WeightSyncError, match="raise the limit on open files") as caught:
            await asyncio.to_thread(session.write, "t")
    assert caught.value.reason is Reason.DISK_EXHAUSTED
    (await asyncio.to_thread(session.write, "t")).close()
    those.blocks.close("t")
    os.close(fd)


async def test_a_secret_that_was_never_given_opens_nothing(those: Attachments) -> None:
    with pytest.raises(WeightSyncError, match="opens nothing") as caught:
        await those.redeem("x", _PEER, -1)
    assert caught.value.reason is Reason.PERMISSION_DENIED
