"""Who has an engine's live parameters, whether they can be handed out, and what is done meanwhile.

The ranks remember who has them, by the kernel's word, and what they hold is compared with the live
version again and again for as long as one such process lives (`LiveChecks`). This here knows which
connections there are, whose transactions they may begin, and whom to tell what was found.

A rank is asked for one of these:

- `offer` and `access`: to send where what is live lies and what opens its memory, as its part of an
  offer, which is named `OFFER/RANK`. `read`: what lies on the host can be read only; `write`: what
  one block is written with, and nothing else; "", of older releases: it can be written at any time.
- `holder`, `pid`, `always` and `job`: to remember a process before it is given what was handed out,
  by its pidfd, which the segment socket has under that name; whether it can always write, and of
  which job it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from weightsync.engine import ATTACH
from weightsync.errors import Reason, WeightSyncError
from weightsync.log_lines import event
from weightsync.shm.attach_socket import AttachServer, HandedOut
from weightsync.v1 import attach_pb2 as pb
from weightsync.wire.socket_server import PeerCredentials
from weightsync_server.engine import EngineApplier, EngineSet
from weightsync_server.engine.block_writers import untold
from weightsync_server.engine.engine_participant import live_version
from weightsync_server.engine.file_offers import offered_by_each
from weightsync_server.engine.live_check import CHECK_S, LiveChecks
from weightsync_server.engine.outcome import PreparedVersion
from weightsync_server.engine.ranks import QUICK_S
from weightsync_server.engine.refusals import check_ready
from weightsync_server.engine.session import EngineSession
from weightsync_server.engine.worker_reports import RankState
from weightsync_server.ops.metrics import Metrics
from weightsync_server.ops.os_errors import translate_os_errors
from weightsync_server.push.sources.same_host import OFFER_S, is_here

logger = logging.getLogger(__name__)


def check_attachable(session: EngineSession) -> None:
    """Refuse an engine whose ranks cannot hand out what is live, with what stands in the way."""
    if ATTACH not in session.info.capabilities:
        raise _refused(
            "install the same weightsync release in vLLM and here, and run all ranks on one "
            "host: this engine shares no memory"
        )
    if len({rank.partition("/")[0] for rank in session.info.ranks}) > 1:
        raise _refused(
            "start vLLM without --data-parallel-size to train in its memory: with data parallel "
            "ranks, each holds its own copy of the model"
        )
    if session.loads is not None:
        raise _refused(
            "push versions of this model instead of attaching: they are loaded beside generation "
            f"({session.loads.no_plan.cause}), so no view of the live weights is a tensor of the "
            "checkpoint"
        )


async def hand_out(session: EngineSession, live: PreparedVersion, access: str) -> HandedOut:
    """Return what opens the memory of every rank (see the module); the caller closes it."""
    offer = f"attach-{secrets.token_hex(8)}"
    names = [f"{offer}/{rank}" for rank in session.info.ranks]

    async def ask() -> None:
        request = {"offer": offer, "access": access}
        check_ready(await session.ranks.attach(live.apply_id, request, QUICK_S))

    segments, what = session.context.segments, "what opens the engine's memory"
    async with offered_by_each(segments, names, ask, what) as ranks:
        return HandedOut(live.record.version, live.digest, ranks).copy()


async def remember(
    session: EngineSession,
    live: PreparedVersion,
    pid: int,
    pidfd: int,
    job: str,
    *,
    always: bool,
) -> None:
    """Have every rank remember a process, before it is given what they handed out.

    `pidfd` is of the process and stays the caller's; `pid` is only for people. `job` is the one
    that the process belongs to, "" for an older release, which names none. With `always` it can
    write at any time.
    """
    name, segments = f"holder-{secrets.token_hex(8)}", session.context.segments
    segments.publish(name, os.dup(pidfd), 0)
    try:
        # An offer of nothing, for ranks that know no better.
        request = {"offer": "", "holder": name, "pid": pid, "always": always, "job": job}
        check_ready(await session.ranks.attach(live.apply_id, request, QUICK_S))
    finally:
        segments.withdraw(name)


def _refused(message: str) -> WeightSyncError:
    return WeightSyncError(Reason.ENGINE_REFUSED, message)


T = TypeVar("T")

#: Offers at once that nobody has fetched: each holds descriptors, and what opens a GPU's memory.
MOST_OFFERS = 64
_LONGEST_JOB = 64


class Attachment:
    """One trainer's, from the offer to a while after its end.

    `engine_id` is of the start of the engine that `session` has. `found` opens its memory, until it
    was handed over. `job` is the trainer's, "" for an older release, which names none.

    Attributes:
        token: Names it to the server when a transaction begins.
        guarded: Whether what was handed out is written in blocks alone.
        remembered: Whether the ranks can remember to whom it was handed out.
        pid: Of the trainer; 0: it has not connected yet.
    """

    def __init__(
        self,
        engine: str,
        session: EngineSession,
        checks: LiveChecks,
        found: HandedOut,
        job: str = "",
    ) -> None:
        self.engine, self.job = engine, job
        self.token = secrets.token_urlsafe(16)
        self.guarded, self.remembered = found.guarded, False
        self.alone = found.on_device or not found.guarded
        self.pid, self.engine_id = 0, ""
        self.session = session
        self._checks = checks
        self._found: HandedOut | None = found
        self._timer: asyncio.TimerHandle | None = None

    def expire_in(self, seconds: float) -> None:
        """Give up what is not handed over by then."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self.drop)

    def take(self) -> HandedOut | None:
        """Return what opens the memory; None: it is too late."""
        self._stop_timer()
        found, self._found = self._found, None
        return found._replace(attachment=self.token) if found is not None else None

    def begin(self) -> None:
        """Take note that the memory is handed over, which may be written from now on."""
        self._checks.writers[self] = ""
        self._checks.watched = True
        self._compare()

    def check(self) -> None:
        """Refuse what is live no more, was restored, or was written outside a transaction."""
        if said := self._checks.writers.get(self, ""):
            raise WeightSyncError(Reason.ENGINE_REFUSED, f"{said}; attach again")
        if self.session.live is None:
            raise WeightSyncError(
                Reason.ENGINE_AWAY,
                "attach again: the engine restarted, or its server reconnected to it",
            )

    def end(self) -> None:
        """The trainer has left: what it wrote at last is found as well."""
        self._checks.break_off("the trainer has detached", self)
        self._stop_timer()
        self._compare()
        # What was written by then counts as its own.
        self._timer = asyncio.get_running_loop().call_later(CHECK_S, self.drop)

    def drop(self) -> None:
        self._stop_timer()
        self._checks.writers.pop(self, None)
        found, self._found = self._found, None
        if found is not None:
            found.close()

    def _compare(self) -> None:
        if self.session.live is not None:
            self._checks.owe(self.session.live)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class Attachments:
    """Makes offers, and hands memory over to who comes with one.

    Trainers connect at `socket`.
    """

    def __init__(self, engines: EngineSet, socket: Path, metrics: Metrics) -> None:
        self._engines = engines
        self._socket = socket
        self._attached = metrics.gauge(
            "weightsync_attached_trainers", "Trainers that have the parameters of an engine."
        )
        self.blocks = OpenBlocks()
        self._loop = asyncio.get_running_loop()
        self._offers: dict[str, Attachment] = {}
        #: Of which the ranks are told at this moment to whom the memory goes.
        self._redeeming: set[Attachment] = set()
        self._open: set[Attachment] = set()
        #: Who was given memory here: engine, process and job. These are known by their connections.
        self._met: set[tuple[str, int, str]] = set()
        #: Who writes each start of an engine that somebody has the memory of.
        self._writers: dict[tuple[str, str], Attachment] = {}

    def start(self, stack: contextlib.AsyncExitStack) -> None:
        """Listen until the stack ends; REQUEST_INVALID: the path is somebody else's."""
        stack.callback(self._close)
        server = AttachServer(self._socket, lambda peer: AttachSession(self, self._loop, peer))
        stack.callback(server.close)

    async def offer(self, request: pb.AttachRequest, peer: str) -> pb.AttachResponse:
        """Have every rank of an engine hand out its memory; return where it can be fetched."""
        self._check_offer(request, peer)
        applier = self.engine(request.engine)
        supervisor = applier.supervisor
        # A trainer that gives up cancels this, whatever the ranks are asked at that moment.
        async with supervisor.exclusive(proof_s=0.0, only_asks=True) as session:
            live = live_version(session)
            check_attachable(session)
            states = await session.states()
            self._check_holders(applier.name, request.job, states)
            remembered = all(state.holders is not None for state in states)
            guarded = bool(request.job) and remembered
            access = "read" if guarded else ""
            found = await hand_out(session, live, access)
        attachment = Attachment(
            applier.name,
            session,
            supervisor.checks,
            found._replace(guarded=guarded),
            request.job,
        )
        attachment.remembered, attachment.engine_id = remembered, session.info.engine_id
        try:
            # Others were made meanwhile.
            self._check_room()
            self._check_alone(attachment)
        except WeightSyncError:
            attachment.drop()
            raise
        attachment.expire_in(OFFER_S)
        secret = secrets.token_urlsafe(32)
        self._offers[secret] = attachment
        self._loop.call_later(OFFER_S, self._offers.pop, secret, None)
        return pb.AttachResponse(socket=str(self._socket), secret=secret, engine=applier.name)

    def engine(self, name: str) -> EngineApplier:
        """Return an engine by its name; "": the only one."""
        found = self._engines.named(name)
        if len(found) > 1:
            names = ", ".join(applier.name for applier in found)
            raise WeightSyncError(
                Reason.REQUEST_INVALID, f"this host has several engines; name one of {names}"
            )
        return found[0]

    def writer(self, engine: str, token: str, peer: str) -> Attachment:
        """Return the attachment for which a transaction is begun; no other job writes beside it.

        Who has memory of an earlier start of the engine counts for nobody; what it begins is
        refused by the transaction, which knows what start there is. An empty `token` is that of an
        older release. `peer` is the caller's address, as gRPC gives it.
        """
        here = [one for one in self._open if one.engine == engine and is_here(peer)]
        mine = [one for one in here if one.token == token or not (token or one.job)]
        if not mine:
            raise WeightSyncError(
                Reason.ENGINE_REFUSED,
                "attach before you begin a transaction, from the engine's host, and stay "
                "attached until it ends: only an attached process can write the memory",
            )
        # Of an older release all are meant.
        attachment = max(mine, key=lambda one: one.session.live is not None)
        place = engine, attachment.engine_id
        before = self._writers.get(place, attachment)
        jobs = {one.job for one in here if one.engine_id == attachment.engine_id}
        if before.job != attachment.job and before.job in jobs:
            raise _written_by(engine, before)
        known = {(one.engine, one.engine_id) for one in self._open}
        self._writers = {at: one for at, one in self._writers.items() if at in known}
        self._writers[place] = attachment
        return attachment

    async def redeem(
        self, secret: str, peer: PeerCredentials, pidfd: int
    ) -> tuple[Attachment, HandedOut]:
        """Return what a secret opens, once, after every rank remembers who comes with it."""
        attachment = self._offers.pop(secret, None)
        found = attachment.take() if attachment is not None else None
        if attachment is None or found is None:
            raise WeightSyncError(
                Reason.PERMISSION_DENIED,
                "this secret opens nothing: it was used, or is too old; call Attach again",
            )
        attachment.pid = peer.pid
        self._redeeming.add(attachment)
        try:
            if attachment.remembered:
                await self._remember(attachment, peer.pid, pidfd)
        except BaseException:
            found.close()
            raise
        finally:
            self._redeeming.discard(attachment)
        attachment.begin()
        self._open.add(attachment)
        self._attached.set(len(self._open))
        named = event("attach.begun", engine=attachment.engine, process=peer.pid)
        logger.info(
            "process %d has the memory of engine %s", peer.pid, attachment.engine, extra=named
        )
        return attachment, found

    async def leave(self, attachment: Attachment, peer: PeerCredentials) -> None:
        self._open.discard(attachment)
        self._attached.set(len(self._open))
        attachment.end()
        named = event("attach.ended", engine=attachment.engine, process=peer.pid)
        logger.info("process %d has left engine %s", peer.pid, attachment.engine, extra=named)

    async def _remember(self, attachment: Attachment, pid: int, pidfd: int) -> None:
        supervisor = self.engine(attachment.engine).supervisor
        async with supervisor.exclusive(proof_s=0.0, only_asks=True) as session:
            here = session is attachment.session
            if here:
                live, always, job = live_version(session), not attachment.guarded, attachment.job
                self._check_holders(attachment.engine, job, await session.states())
                self._met.add((attachment.engine, pid, job))
                await remember(session, live, pid, pidfd, job, always=always)
        if not here:
            # Said in there, it would be this engine that is away.
            raise WeightSyncError(
                Reason.ENGINE_AWAY, "attach again: the engine restarted meanwhile"
            )

    def _check_offer(self, request: pb.AttachRequest, peer: str) -> None:
        if not is_here(peer):
            raise WeightSyncError(
                Reason.ENGINE_REFUSED,
                "run the trainer on the engine's host and connect through a unix socket, or push "
                "versions instead: memory is shared only on that host",
            )
        if len(request.job) > _LONGEST_JOB or not request.job.isprintable():
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                f"job must be at most {_LONGEST_JOB} printable characters",
            )
        self._check_room()

    def _check_room(self) -> None:
        if len(self._offers) >= MOST_OFFERS:
            raise WeightSyncError(
                Reason.LIMIT_EXCEEDED,
                f"use the secrets that were offered, or wait {OFFER_S:g} s: {MOST_OFFERS} offers "
                "are still unused",
                retry_after_s=1.0,
            )

    def _check_alone(self, attachment: Attachment) -> None:
        """Refuse memory that can always be written to a second job."""
        for other in (*self._open, *self._redeeming, *self._offers.values()):
            # Memory of an engine that was started anew is nobody's business.
            place = other.engine, other.engine_id
            if place != (attachment.engine, attachment.engine_id) or other.job == attachment.job:
                continue
            if attachment.alone or other.alone:
                raise _written_by(attachment.engine, other)

    def _check_holders(self, engine: str, job: str, states: Sequence[RankState]) -> None:
        """Refuse memory that a process of another job can always write, by the ranks' word.

        A server before this one gave it that, so that there is no connection to know it by.
        """
        if why := untold(states):
            raise WeightSyncError(Reason.ENGINE_REFUSED, why, retry_after_s=1.0)
        living = {pid for state in states for pid in state.holders or ()}
        self._met = {each for each in self._met if each[0] != engine or each[1] in living}
        for pid, other in (holder for state in states for holder in state.unguarded_by):
            if other != job and (engine, pid, other) not in self._met:
                # It has the memory as long as it lives, for all that is known here.
                raise _other_job(engine, f"end {_process(pid)}, then try again")

    def _close(self) -> None:
        for attachment in (*self._offers.values(), *self._open):
            attachment.drop()


class AttachSession:
    """See `AttachHandler`; worked by a thread of the socket, done on `loop`."""

    def __init__(
        self, attachments: Attachments, loop: asyncio.AbstractEventLoop, peer: PeerCredentials
    ) -> None:
        self._attachments = attachments
        self._loop = loop
        self._peer = peer
        self._attachment: Attachment | None = None

    def redeem(self, secret: str, pidfd: int) -> HandedOut:
        work = self._attachments.redeem(secret, self._peer, pidfd)
        self._attachment, found = self._do(work)
        return found

    def write(self, transaction: str) -> HandedOut:
        async def take() -> HandedOut:
            return self._attachments.blocks.take(transaction, self._attachment)

        return self._do(take())

    def check(self) -> None:
        if self._attachment is not None:
            self._attachment.check()

    def close(self) -> None:
        if self._attachment is not None and not self._loop.is_closed():
            leaving = self._attachments.leave(self._attachment, self._peer)
            asyncio.run_coroutine_threadsafe(leaving, self._loop)

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        with translate_os_errors("handing out the engine's memory"):
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _written_by(engine: str, other: Attachment) -> WeightSyncError:
    who = _process(other.pid)
    return _other_job(engine, f"end {who} or close its attachment, then try again")


def _process(pid: int) -> str:
    return f"process {pid}" if pid else "another process"


def _other_job(engine: str, remedy: str) -> WeightSyncError:
    return WeightSyncError(
        Reason.ENGINE_REFUSED,
        f"{remedy}: it writes engine {engine}, and only one job at a time may (processes of one "
        "torch.distributed group are one job if they attach after init_process_group)",
    )


class OpenBlocks:
    """Gives every process of a job what opens the memory, in its block alone.

    What was given is a descriptor, so that the kernel tells the ranks when all are closed.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Attachment, HandedOut]] = {}
        self._open: set[str] = set()

    def keep(self, transaction: str, writer: Attachment, found: HandedOut) -> None:
        """Have ready what the block of a writer is written with; nobody is given it yet."""
        self._kept[transaction] = writer, found

    def open(self, transaction: str) -> None:
        """Give what was kept to who names the transaction and is of its writer's job."""
        self._open.add(transaction)

    def close(self, transaction: str) -> None:
        """Give it to nobody any more; repeating it is harmless."""
        self._open.discard(transaction)
        _, found = self._kept.pop(transaction, (None, None))
        if found is not None:
            found.close()

    def take(self, transaction: str, attachment: Attachment | None) -> HandedOut:
        """Return what a block is written with; the caller closes it.

        APPLY_RESTORED: it is not open. ENGINE_REFUSED: `attachment` is of another job, another
        engine or another start of it, whose ranks do not remember who has it.
        """
        writer, found = self._kept.get(transaction, (None, None))
        if writer is None or found is None or transaction not in self._open:
            raise WeightSyncError(
                Reason.APPLY_RESTORED,
                f"transaction {transaction} is not open, so nothing may be written in it; begin "
                "another one",
            )
        # Everybody may know its name, which GetStatus tells.
        if attachment is None or attachment.job != writer.job:
            raise _written_by(writer.engine, writer)
        if (attachment.engine, attachment.engine_id) != (writer.engine, writer.engine_id):
            raise _refused(
                f"attach to engine {writer.engine} again: transaction {transaction} writes its "
                "memory, but this attachment is to another engine or to an earlier process of it"
            )
        return found.copy()
