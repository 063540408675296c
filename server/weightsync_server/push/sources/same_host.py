"""Pushes by trainers on this host: they are lent the memory of a push and write their shards there.

What lies there is believed as little as what a stream brings: the header is compared with the
layout, and the fetchers' digests are the truth. Before that, the kernel has to tell that nobody can
write there any more.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import logging
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote

from weightsync import clock, failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.same_host_server import LendingServer, WriteLease
from weightsync.shm.segments import writers_are_seen
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.wire.addresses import is_loopback
from weightsync_server.auth.callers import caller
from weightsync_server.ops.os_errors import to_refusal
from weightsync_server.push.lifecycle import FATAL
from weightsync_server.push.resume import resume
from weightsync_server.push.sources.box_copies import BoxCopySession
from weightsync_server.push.sources.cuda_ipc import GpuCopySession
from weightsync_server.push.sources.ipc_opened import Places
from weightsync_server.push.state import check_open
from weightsync_server.push.task_set import is_running
from weightsync_server.push.validation import refused
from weightsync_server.push.verification import check_taken_back

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Coroutine
    from pathlib import Path
    from typing import Any

    from weightsync.shm.same_host_server import PeerCredentials
    from weightsync_server.push.parts import Push, Pushes
    from weightsync_server.push.shard_state import ShardState
    from weightsync_server.push.sources.gpu_copies import GpuCopier

__all__ = ["OFFER_S", "SameHostOffers", "is_here", "start_lending"]

T = TypeVar("T")

logger = logging.getLogger("weightsync.audit")
_log = logging.getLogger(__name__)

#: Seconds for which an offer is good.
OFFER_S = 30.0


def is_here(peer: str) -> bool:
    """Return whether the peer of a call, as gRPC tells it, runs on this host."""
    kind, _, rest = unquote(peer).partition(":")
    return kind == "unix" or (kind in ("ipv4", "ipv6") and is_loopback(rest.rpartition(":")[0]))


def start_lending(
    stack: contextlib.AsyncExitStack,
    pushes: Pushes,
    socket: Path,
    silence_s: float,
    collector: GpuCopier,
) -> SameHostOffers | None:
    """Lend from now on, until the stack ends; None: this kernel cannot tell who may still write.

    Args:
        stack: Ends it.
        pushes: All pushes.
        socket: Path at which trainers connect.
        silence_s: Seconds without a request after which a connection is ended.
        collector: Copies what lies on GPUs.

    Raises:
        WeightSyncError: REQUEST_INVALID; the path is somebody else's or holds no socket.
    """
    if not writers_are_seen():
        logger.warning("no memory is lent to trainers: this kernel grants no leases on it")
        return None
    lender = SameHostOffers(pushes, socket, collector)
    stack.callback(LendingServer(socket, lender.desk, silence_s).close)
    return lender


@dataclass(frozen=True, slots=True)
class _Offer:
    push_id: str
    writer: int
    who: str
    until: float


class SameHostOffers:
    """Makes offers and opens a desk for each trainer that comes with one.

    Args:
        pushes: All pushes.
        socket: Path at which trainers connect.
        collector: Copies what lies on GPUs.
    """

    def __init__(self, pushes: Pushes, socket: Path, collector: GpuCopier) -> None:
        self._pushes = pushes
        self.meters = pushes.meters
        self.collector = collector
        self.places = Places()
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._offers: dict[str, _Offer] = {}

    def offer(self, response: pb.BeginPushResponse, peer: str, writer: int = 0) -> None:
        """Add an offer to the answer of a BeginPush that asked for one, if it gets one.

        Args:
            response: The answer.
            peer: Who asked, as gRPC tells it.
            writer: Which of several writers that is.
        """
        push = self._pushes.find(response.push_id)
        # Of several writers each begins for itself, as whoever it is.
        mine = push.state.caller == caller.get() or push.state.writers is not None
        if (
            not is_here(peer)
            or not mine
            or (push.state.delta is not None and push.state.writers is None)
            or push.state.committed is not None
        ):
            return
        now = clock.monotonic()
        # One offer per push and writer: who begins again has lost the last one.
        self._offers = {
            secret: offer
            for secret, offer in self._offers.items()
            if offer.until > now and (offer.push_id, offer.writer) != (push.state.id, writer)
        }
        secret = secrets.token_urlsafe(32)
        self._offers[secret] = _Offer(push.state.id, writer, push.state.caller, now + OFFER_S)
        response.same_host_offer.socket = str(self._socket)
        response.same_host_offer.secret = secret

    def desk(self, peer: PeerCredentials) -> SameHostSession:
        """Return what answers a connection; for any thread."""
        return SameHostSession(self, self._loop, peer)

    def redeem(self, secret: str, peer: PeerCredentials) -> tuple[Push, int]:
        """Return the push that a secret opens, and for which writer; it opens nothing any more.

        Raises:
            WeightSyncError: PERMISSION_DENIED; or why the push has failed.
        """
        offer = self._offers.pop(secret, None)
        if offer is None or offer.until < clock.monotonic():
            raise WeightSyncError(
                Reason.PERMISSION_DENIED,
                "this secret opens no push: it was used, or is too old; call BeginPush again",
            )
        push = self._pushes.find(offer.push_id)
        check_open(push.state)
        self._note(push, offer.who, peer)
        return push, offer.writer

    def _note(self, push: Push, who: str, peer: PeerCredentials) -> None:
        # No call, but a change of state: a line of the same form as those of calls.
        now = dt.datetime.fromtimestamp(clock.wall(), dt.UTC)
        line = {
            "time": now.isoformat(timespec="milliseconds"),
            "who": who,
            "role": "push",
            "method": "same_host",
            "model": push.state.record.model,
            "version": push.state.record.version,
            "push_id": push.state.id,
            "outcome": "OK",
            "peer": f"pid:{peer.pid} uid:{peer.uid}",
        }
        logger.info("%s", json.dumps(line))


class SameHostSession:
    """The `Desk` of one connection, worked by a thread of the socket.

    Args:
        lender: Knows the offers.
        loop: The event loop, on which everything is done.
        peer: The process at the other end.
    """

    def __init__(
        self, lender: SameHostOffers, loop: asyncio.AbstractEventLoop, peer: PeerCredentials
    ) -> None:
        self._lender = lender
        self._loop = loop
        self._peer = peer
        self._push: Push | None = None
        self._writer = 0
        self._gpu_copies = GpuCopySession(lender.collector, self, lender.places, lender.meters)
        self._box_copies = BoxCopySession(lender.collector, self, lender.meters)

    def redeem(self, secret: str) -> None:
        """Join the push that the secret is for."""
        self._do(self._redeem(secret))

    def lend(self, shard: int) -> WriteLease:
        """Return the memory of a shard of which nothing is here."""
        return self._do(self._grant_write(shard))

    def written(self, shard: int, digests: bytes) -> None:
        """Take a shard back, with the digests that the trainer computed."""
        self._do(self._written(shard, digests))

    def collect(self, shard: int, where: dict[str, Any]) -> str:
        """Begin to copy a shard of which nothing is here from a GPU; tells why that cannot be."""
        return self._do(self._collect(shard, where))

    def announce_ipc(self, shards: dict[int, dict[str, Any]]) -> None:
        """Take note of where shards lie that `collect` will be asked for."""
        self._do(self._announce(shards))

    def collected(self, shard: int) -> bytes:
        """Return the digests of a shard that was copied."""
        return self._do(self._digests(shard))

    def close(self) -> None:
        """Leave the push."""
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._leave(), self._loop)

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(self._refusing(work), self._loop).result()

    async def _refusing(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except Exception as error:
            refusal = to_refusal(error, "lending memory to a trainer")
            if refusal is not error:
                _log.exception("lending memory to a trainer")
            if self._push is not None and refusal.reason in FATAL:
                self._push.lifecycle.fail(refusal)
                await self._push.lifecycle.closed()
            if refusal is error:
                raise
            raise refusal from error

    async def _redeem(self, secret: str) -> None:
        push, self._writer = self._lender.redeem(secret, self._peer)
        await resume(push)
        push.lifecycle.join()
        self._push = push

    async def _collect(self, shard: int, where: dict[str, Any]) -> str:
        push, upload = self._upload(shard)
        await failpoints.reach("receive.collect")
        if push.state.writers is not None:
            whole, boxes = push.boxes.find(shard, self._writer)
            _check_nothing_here(shard, boxes.received)
            return await self._box_copies.begin(push, whole, boxes, where)
        _check_nothing_here(shard, upload.received)
        return await self._gpu_copies.begin(push, upload, where)

    async def _announce(self, shards: dict[int, dict[str, Any]]) -> None:
        if self._push is not None and self._push.state.writers is not None:
            # None of them has a whole shard.
            return
        for shard, where in shards.items():
            self._gpu_copies.announce(*self._upload(shard), where)
            # What is told of many tensors keeps nobody else waiting.
            await asyncio.sleep(0)

    async def _digests(self, shard: int) -> bytes:
        push, upload = self._upload(shard)
        if push.state.writers is not None:
            return await self._box_copies.digests(push, *push.boxes.find(shard, self._writer))
        return await self._gpu_copies.digests(push, upload)

    async def _grant_write(self, shard: int) -> WriteLease:
        push, upload = self._upload(shard)
        await failpoints.reach("receive.lend")
        if push.state.writers is not None:
            _, boxes = push.boxes.find(shard, self._writer)
            _check_nothing_here(shard, boxes.received)
            if boxes.sends_changes:
                raise refused(f"what changed in boxes of shard {shard} is sent as chunks")
            if not boxes.size:
                # Without it the shard may be proved at any time, and nobody may write any more.
                raise refused(
                    f"writer {self._writer} sends no bytes of shard {shard}; send its digests"
                )
            boxes.own(self)
            boxes.borrower = self._peer.pid
        else:
            _check_nothing_here(shard, upload.received)
            upload.own(self)
        segment = await push.pipeline.ready(upload)
        push.pipeline.begin_receive()
        return WriteLease(segment.lend(), segment.huge)

    async def _written(self, shard: int, digests: bytes) -> None:
        push, upload = self._upload(shard)
        if push.state.writers is not None:
            self._boxes_written(push, shard, digests)
            return
        segment = upload.segment
        if upload.owner is not self or segment is None or not segment.granted:
            raise refused(f"shard {shard} was not lent on this connection; ask for it first")
        await failpoints.reach("receive.written")
        await check_taken_back(shard, segment)
        check_open(push.state)
        upload.give(0, digests)
        upload.received_to(upload.entry.size)
        self._lender.meters.add_received(upload.received)
        await push.pipeline.advance(upload, segment)

    def _boxes_written(self, push: Push, shard: int, digests: bytes) -> None:
        """Take a writer's boxes; who brings the last of the shard proves that all let go of it."""
        whole, boxes = push.boxes.find(shard, self._writer)
        other_way = is_running(boxes.gpu_copy) or boxes.by_server or boxes.sends_changes
        if boxes.owner is not self or other_way:
            raise refused(f"shard {shard} was not lent on this connection; ask for it first")
        boxes.give(0, digests)
        boxes.received_to(boxes.size)
        boxes.owner = None
        self._lender.meters.add_received(boxes.size)
        push.pipeline.advance_boxes(whole)

    def _upload(self, shard: int) -> tuple[Push, ShardState]:
        push = self._push
        if push is None:
            raise refused("the first request must redeem a secret")
        check_open(push.state)
        upload = push.state.shards.get(shard)
        if upload is None or upload.tensors is None:
            raise refused(f"memory of shard {shard} before the last part of its layout; send it")
        return push, upload

    async def _leave(self) -> None:
        push, self._push = self._push, None
        # Nobody else may send a shard that is still being copied.
        await self._gpu_copies.end()
        await self._box_copies.end(push)
        if push is not None and push.state.committed is None:
            push.lifecycle.leave(self)


def _check_nothing_here(shard: int, received: int) -> None:
    if received:
        raise WeightSyncError(
            Reason.OFFSET_MISMATCH,
            f"{received} bytes of shard {shard} are here already; send the rest as chunks",
            metadata={"shard": str(shard), "received_bytes": str(received)},
        )
