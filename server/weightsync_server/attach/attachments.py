"""Who has an engine's live parameters, and what is done as long as somebody has.

A trainer that has them can write them at any time, and nothing but a comparison shows it. So what
every rank holds is compared with the live version again and again, and once more after the trainer
has left.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import TYPE_CHECKING, TypeVar

from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.attach_server import AttachServer
from weightsync.v1 import attach_pb2 as pb
from weightsync_server.attach.attachable import check_attachable, hand_out
from weightsync_server.engine.engine_applier import live_version
from weightsync_server.push.sources.same_host import OFFER_S, is_here

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Coroutine
    from pathlib import Path
    from typing import Any

    from weightsync.shm.attach_server import HandedOut
    from weightsync.shm.segment_socket import SegmentServer
    from weightsync.wire.peer_server import PeerCredentials
    from weightsync_server.attach.attach_metrics import AttachMetrics
    from weightsync_server.engine import EngineApplier, EngineSet
    from weightsync_server.engine.live_check import LiveChecks
    from weightsync_server.engine.session import EngineSession

__all__ = ["Attachments"]

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: From one comparison to the next while a trainer is attached, seconds.
CHECK_S = 60.0


class Attachment:
    """One trainer's, from the offer to a while after its end.

    Args:
        engine: Name of the engine.
        session: Of this start of it.
        checks: Compares what it holds.
        found: What opens its memory, until it was handed over.
    """

    def __init__(
        self, engine: str, session: EngineSession, checks: LiveChecks, found: HandedOut
    ) -> None:
        self.engine = engine
        self._session = session
        self._checks = checks
        self._found: HandedOut | None = found
        self._timer: asyncio.TimerHandle | None = None

    def expire_in(self, seconds: float) -> None:
        """Give up what is not handed over by then."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self.drop)

    def begin(self) -> HandedOut | None:
        """Return what opens the memory, which may be written from now on; None: it is too late."""
        found, self._found = self._found, None
        if found is not None:
            self._checks.writers[self] = ""
            self._repeat()
        return found

    def check(self) -> None:
        """Refuse to go on with what is live no more, or was restored.

        Raises:
            WeightSyncError: ENGINE_AWAY; ENGINE_REFUSED: something was written outside a
                transaction.
        """
        if said := self._checks.writers.get(self, ""):
            raise WeightSyncError(Reason.ENGINE_REFUSED, f"{said}; attach again")
        if self._session.live is None:
            raise WeightSyncError(
                Reason.ENGINE_AWAY,
                "the engine was started anew, or its server has connected to it anew; attach again",
            )

    def end(self) -> None:
        """The trainer has left: what it wrote at last is found as well."""
        self._stop_timer()
        self._compare()
        # What was written by then counts as its own.
        self._timer = asyncio.get_running_loop().call_later(CHECK_S, self.drop)

    def drop(self) -> None:
        """Keep nothing of it."""
        self._stop_timer()
        self._checks.writers.pop(self, None)
        found, self._found = self._found, None
        if found is not None:
            found.close()

    def _repeat(self) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(CHECK_S, self._repeat)
        self._compare()

    def _compare(self) -> None:
        if self._session.live is not None:
            self._checks.owe(self._session.live)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class Attachments:
    """Makes offers, and hands memory over to who comes with one.

    Args:
        engines: Of this host.
        segments: Where ranks send what opens their memory.
        socket: Path at which trainers connect.
        metrics: Counts them.
    """

    def __init__(
        self, engines: EngineSet, segments: SegmentServer, socket: Path, metrics: AttachMetrics
    ) -> None:
        self._engines = engines
        self._segments = segments
        self._socket = socket
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._offers: dict[str, Attachment] = {}
        self._open: set[Attachment] = set()

    def start(self, stack: contextlib.AsyncExitStack) -> None:
        """Listen until the stack ends.

        Raises:
            WeightSyncError: REQUEST_INVALID; the path is somebody else's or holds no socket.
        """
        stack.callback(self._close)
        server = AttachServer(self._socket, lambda peer: AttachSession(self, self._loop, peer))
        stack.callback(server.close)

    async def offer(self, engine: str, peer: str) -> pb.AttachResponse:
        """Have every rank of an engine hand out its memory; return where it can be fetched.

        Args:
            engine: Its name; "": the only one.
            peer: Who asks, as gRPC tells it.

        Raises:
            WeightSyncError: ENGINE_REFUSED with what stands in the way, REQUEST_INVALID, or why
                nothing can be done with the engine now.
        """
        if not is_here(peer):
            raise WeightSyncError(
                Reason.ENGINE_REFUSED,
                "memory is handed out on the engine's host alone; run the trainer there and "
                "connect by a unix socket, or push versions from elsewhere",
            )
        applier = self.engine(engine)
        supervisor = applier.supervisor
        async with supervisor.exclusive(proof_s=0.0) as session:
            live = live_version(session)
            check_attachable(session)
            found = await hand_out(session, live, self._segments)
        attachment = Attachment(applier.name, session, supervisor.checks, found)
        attachment.expire_in(OFFER_S)
        secret = secrets.token_urlsafe(32)
        self._offers[secret] = attachment
        self._loop.call_later(OFFER_S, self._offers.pop, secret, None)
        return pb.AttachResponse(socket=str(self._socket), secret=secret, engine=applier.name)

    def engine(self, name: str) -> EngineApplier:
        """Return an engine by its name; "": the only one.

        Raises:
            WeightSyncError: REQUEST_INVALID: there are several, or none of this name.
        """
        found = self._engines.named(name)
        if len(found) > 1:
            names = ", ".join(applier.name for applier in found)
            raise WeightSyncError(
                Reason.REQUEST_INVALID, f"this host has several engines; name one of {names}"
            )
        return found[0]

    async def redeem(self, secret: str, peer: PeerCredentials) -> tuple[Attachment, HandedOut]:
        """Return what a secret opens; it opens nothing any more.

        Raises:
            WeightSyncError: PERMISSION_DENIED.
        """
        attachment = self._offers.pop(secret, None)
        found = attachment.begin() if attachment is not None else None
        if attachment is None or found is None:
            raise WeightSyncError(
                Reason.PERMISSION_DENIED,
                "this secret opens nothing: it was used, or is too old; call Attach again",
            )
        self._open.add(attachment)
        self._metrics.set_attached(len(self._open))
        logger.info("process %d has the memory of engine %s", peer.pid, attachment.engine)
        return attachment, found

    async def leave(self, attachment: Attachment, peer: PeerCredentials) -> None:
        """Take note that a trainer's connection has ended."""
        self._open.discard(attachment)
        self._metrics.set_attached(len(self._open))
        attachment.end()
        logger.info("process %d has left engine %s", peer.pid, attachment.engine)

    def _close(self) -> None:
        for attachment in (*self._offers.values(), *self._open):
            attachment.drop()


class AttachSession:
    """See `AttachHandler`; worked by a thread of the socket.

    Args:
        attachments: Knows the offers.
        loop: The event loop, on which everything is done.
        peer: The process at the other end.
    """

    def __init__(
        self, attachments: Attachments, loop: asyncio.AbstractEventLoop, peer: PeerCredentials
    ) -> None:
        self._attachments = attachments
        self._loop = loop
        self._peer = peer
        self._attachment: Attachment | None = None

    def redeem(self, secret: str) -> HandedOut:
        """Return what the secret opens."""
        self._attachment, found = self._do(self._attachments.redeem(secret, self._peer))
        return found

    def check(self) -> None:
        """Refuse to go on where that is no use."""
        if self._attachment is not None:
            self._attachment.check()

    def close(self) -> None:
        """Leave."""
        if self._attachment is not None and not self._loop.is_closed():
            leaving = self._attachments.leave(self._attachment, self._peer)
            asyncio.run_coroutine_threadsafe(leaving, self._loop)

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
