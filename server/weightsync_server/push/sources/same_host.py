"""Pushes by trainers on this host: they are lent the memory of a push and write their shards there.

What lies there is believed as little as what a stream brings, and only once the kernel has told
that nobody can write there any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import logging
import secrets
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

from weightsync import clock, failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.same_host import PeerCredentials, SameHostServer, WriteLease
from weightsync.shm.segments import writers_are_seen
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.wire.grpc_channels import is_loopback
from weightsync_server.auth.audit import log_call
from weightsync_server.ops.os_errors import to_refusal
from weightsync_server.push.lifecycle import FATAL
from weightsync_server.push.resume import resume
from weightsync_server.push.shard_part import PartFraming
from weightsync_server.push.sources.gpu_copies import GpuCopySession, Places
from weightsync_server.push.state import check_open
from weightsync_server.push.validation import refused
from weightsync_server.push.verification import check_taken_back

if TYPE_CHECKING:
    from weightsync_server.push.parts import Push, Pushes
    from weightsync_server.push.shard_part import ShardPart
    from weightsync_server.push.sources.gpu_copies import GpuCopier


T = TypeVar("T")

logger = logging.getLogger(__name__)

#: Seconds for which an offer is good.
OFFER_S = 30.0


def is_here(peer: str) -> bool:
    kind, _, rest = unquote(peer).partition(":")
    return kind == "unix" or (kind in ("ipv4", "ipv6") and is_loopback(rest.rpartition(":")[0]))


def serve_same_host(
    stack: contextlib.AsyncExitStack,
    pushes: Pushes,
    socket: Path,
    silence_s: float,
    collector: GpuCopier,
) -> SameHostOffers | None:
    """Lend from now on, until the stack ends; None: this kernel cannot tell who may still write.

    `socket` is the path at which trainers connect; a connection is ended after `silence_s` without
    a request.
    """
    if not writers_are_seen():
        logger.warning(
            "trainers get no shared memory: this kernel does not support file leases on it"
        )
        return None
    offers = SameHostOffers(pushes, socket, collector)
    stack.callback(SameHostServer(socket, offers.session, silence_s).close)
    return offers


@dataclass(frozen=True, slots=True)
class _Offer:
    push_id: str
    writer: int
    who: str
    until: float


class SameHostOffers:
    def __init__(self, pushes: Pushes, socket: Path, collector: GpuCopier) -> None:
        self._pushes = pushes
        self.meters = pushes.meters
        self.collector = collector
        self.places = Places()
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._offers: dict[str, _Offer] = {}

    def offer(
        self, response: pb.BeginPushResponse, peer: str, writer: int = 0, who: str = ""
    ) -> None:
        """Add an offer to the answer of a BeginPush, if it gets one.

        `peer` is the address that gRPC gives; `writer` is the one of several that asked.
        """
        push = self._pushes.find(response.push_id)
        # Of several writers each begins for itself, as whoever it is.
        several = push.state.writers.several
        mine = push.state.caller == who or several
        if (
            not is_here(peer)
            or not mine
            or (push.state.delta is not None and not several)
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

    def session(self, peer: PeerCredentials) -> SameHostSession:
        """Return what answers a connection; for any thread."""
        return SameHostSession(self, self._loop, peer)

    def redeem(self, secret: str, peer: PeerCredentials) -> tuple[Push, int]:
        """Return the push that a secret opens, and for which writer; it opens nothing any more."""
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
        log_call("audit.same_host", line, {})


class SameHostSession:
    """The session of one connection, worked by a thread of the socket; all is done on `loop`."""

    def __init__(
        self, offers: SameHostOffers, loop: asyncio.AbstractEventLoop, peer: PeerCredentials
    ) -> None:
        self._offers = offers
        self._loop = loop
        self._peer = peer
        self._push: Push | None = None
        self._writer = 0
        self._gpu_copies = GpuCopySession(offers.collector, self, offers.places, offers.meters)

    def redeem(self, secret: str) -> None:
        self._do(self._redeem(secret))

    def lend(self, shard: int) -> WriteLease:
        return self._do(self._grant_write(shard))

    def written(self, shard: int, digests: bytes) -> None:
        self._do(self._written(shard, digests))

    def collect(self, shard: int, where: dict[str, Any]) -> str:
        return self._do(self._collect(shard, where))

    def announce_ipc(self, shards: dict[int, dict[str, Any]]) -> None:
        self._do(self._announce(shards))

    def collected(self, shard: int) -> bytes:
        return self._do(self._digests(shard))

    def close(self) -> None:
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._leave(), self._loop)

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(self._refusing(work), self._loop).result()

    async def _refusing(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except Exception as error:
            refusal = to_refusal(error, "giving a trainer access to memory")
            if refusal is not error:
                logger.exception("giving a trainer access to memory")
            if self._push is not None and refusal.reason in FATAL:
                self._push.lifecycle.fail(refusal)
                await self._push.lifecycle.closed()
            if refusal is error:
                raise
            raise refusal from error

    async def _redeem(self, secret: str) -> None:
        push, self._writer = self._offers.redeem(secret, self._peer)
        await resume(push)
        push.lifecycle.join()
        self._push = push

    async def _collect(self, shard: int, where: dict[str, Any]) -> str:
        push, part = self._part(shard)
        await failpoints.reach("receive.collect")
        _check_nothing_here(part)
        return await self._gpu_copies.begin(push, part, where)

    async def _announce(self, shards: dict[int, dict[str, Any]]) -> None:
        if self._push is not None and self._push.state.writers.several:
            # None of them has a whole shard.
            return
        for shard, where in shards.items():
            self._gpu_copies.announce(*self._part(shard), where)
            # What is told of many tensors keeps nobody else waiting.
            await asyncio.sleep(0)

    async def _digests(self, shard: int) -> bytes:
        return await self._gpu_copies.digests(*self._part(shard))

    async def _grant_write(self, shard: int) -> WriteLease:
        push, part = self._part(shard)
        await failpoints.reach("receive.lend")
        _check_nothing_here(part)
        if part.framing is PartFraming.CHANGES:
            raise refused(f"send what changed in boxes of shard {shard} as chunks")
        if not part.size:
            # Without it the shard may be proved at any time, and nobody may write any more.
            raise refused(
                f"writer {self._writer} sends no bytes of shard {shard}; send its digests"
            )
        part.own(self)
        part.holder = self._peer.pid
        segment = await push.pipeline.ready(part.shard)
        push.pipeline.begin_receive()
        return WriteLease(segment.lend(), segment.huge)

    async def _written(self, shard: int, digests: bytes) -> None:
        push, part = self._part(shard)
        segment = part.shard.segment
        granted = segment is not None and segment.granted and part.gpu_copy is None
        if part.owner is not self or segment is None or not granted:
            raise refused(f"shard {shard} was not shared on this connection; ask for it first")
        if part.framing is PartFraming.FILE:
            # Of several writers all let go of the shard before its proof.
            await failpoints.reach("receive.written")
            await check_taken_back(shard, segment)
            check_open(push.state)
        part.give(0, digests)
        part.received_to(part.size)
        part.owner = None
        self._offers.meters.add_received(part.size)
        await push.pipeline.advance(part)

    def _part(self, shard: int) -> tuple[Push, ShardPart]:
        push = self._push
        if push is None:
            raise refused("the first request must redeem a secret")
        check_open(push.state)
        described = push.state.shards.get(shard)
        if described is None or described.tensors is None:
            raise refused(
                f"send the last part of the layout of shard {shard} before asking for its memory"
            )
        return push, push.slices.find(shard, self._writer)

    async def _leave(self) -> None:
        push, self._push = self._push, None
        # Nobody else may send a shard that is still being copied.
        await self._gpu_copies.end()
        if push is not None and push.state.committed is None:
            push.lifecycle.leave(self)


def _check_nothing_here(part: ShardPart) -> None:
    if part.received:
        shard, received = part.shard.index, part.received
        raise WeightSyncError(
            Reason.OFFSET_MISMATCH,
            f"{received} bytes of shard {shard} are here already; send the rest as chunks",
            metadata={"shard": str(shard), "received_bytes": str(received)},
        )
