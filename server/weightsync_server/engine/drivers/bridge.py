"""A vLLM server in another process, reached over the bridge's unix socket."""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Never, TypeVar

import grpc

from weightsync import __version__, clock
from weightsync.engine import (
    OLDEST_PROTOCOL,
    PROTOCOL_VERSION,
    CacheUse,
    EngineHealth,
    EngineInfo,
    EngineState,
    Lease,
    OnExpiry,
    PauseSpec,
    SwitchOrder,
    SwitchOutcome,
    WaitingUpdate,
)
from weightsync.engine.leases import OWNER_PID, from_message, owned_by, to_message
from weightsync.engine.v1 import engine_pb2 as pb
from weightsync.engine.v1 import engine_pb2_grpc
from weightsync.errors import Reason, WeightSyncError
from weightsync.wire.rpc_status import from_call
from weightsync_server.engine.refusals import duration

#: How long an engine that has restarted is left to the server that had it before, seconds.
_TURN_S = 5.0


class Ownership:
    """Owns an engine from `take` on, until `close`, or until the connection to it breaks.

    A server that is refused the engine is told the owner's `run_dir`. `known` is whether the bridge
    knows owners; a bridge of an older release obeys the server that said hello last.
    """

    def __init__(
        self,
        stub: Any,
        server_id: str,
        run_dir: Path | None,
        refuse: Callable[[grpc.aio.AioRpcError], Never],
    ) -> None:
        self.known = False
        self._stub = stub
        folder = "" if run_dir is None else os.fsencode(run_dir.absolute()).decode(errors="replace")
        self._owner = pb.Owner(server_id=server_id, pid=os.getpid(), run_dir=folder)
        self._refuse = refuse
        self._call: Any = None
        #: Start of the engine that another server had, and until when that has the first turn.
        self._others, self._turn_ends = "", 0.0

    async def take(self, seconds: float) -> None:
        """Return when this server owns the engine, or the bridge knows no owners.

        ENGINE_OWNED: another server does. ENGINE_AWAY: nobody answers within `seconds`.
        """
        if self._call is not None and not self._call.done():
            return
        call = self._stub.Own(pb.OwnRequest(owner=self._owner))
        try:
            async with asyncio.timeout(seconds):
                answer = await call.read()
        except grpc.aio.AioRpcError as error:
            self.known = False
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                self._refuse(error)
            return
        except TimeoutError:
            answer = grpc.aio.EOF
        if answer is grpc.aio.EOF:
            call.cancel()
            raise WeightSyncError(
                Reason.ENGINE_AWAY, "vLLM does not say which server owns it; check vLLM's log"
            )
        self._call, self.known = call, True

    def check(self, owner: pb.Owner, engine_id: str) -> None:
        """Refuse an engine that another server owns, or owned before the engine restarted.

        An empty `owner` means that the engine has none; `engine_id` names this start of it.
        ENGINE_AWAY: the other has the first turn.
        """
        if owner.server_id and owner.server_id != self._owner.server_id:
            self._others, self._turn_ends = engine_id, math.inf
            raise WeightSyncError(
                Reason.ENGINE_OWNED, owned_by(owner), metadata={OWNER_PID: str(owner.pid)}
            )
        if not self._others or self._others == engine_id:
            # It has died, or this server has the engine.
            self._others = ""
            return
        now = clock.monotonic()
        self._turn_ends = min(self._turn_ends, now + _TURN_S)
        if now < self._turn_ends:
            raise WeightSyncError(
                Reason.ENGINE_AWAY,
                f"the engine restarted; for {_TURN_S:g} s it is reserved for the "
                "weightsync-server that owned it before, and then this server takes it",
                retry_after_s=1.0,
            )
        self._others = ""

    def close(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None


def understood(refusal: WeightSyncError) -> WeightSyncError:
    """Return what the bridge has refused, as this release calls it.

    Servers of older releases, which the bridge refuses too, know no ENGINE_OWNED.
    """
    if refusal.reason is Reason.ENGINE_REFUSED and OWNER_PID in refusal.metadata:
        return WeightSyncError(Reason.ENGINE_OWNED, refusal.message, metadata=refusal.metadata)
    return refusal


_T = TypeVar("_T")

#: Longest time in which the ranks send descriptors, and in which a trainer is answered, seconds.
_OFFER_S, _END_S = 90.0, 5.0


class BridgeUpdates:
    def __init__(
        self, stub: Any, server_id: str, refuse: Callable[[grpc.aio.AioRpcError], Never]
    ) -> None:
        self._stub = stub
        self._id = server_id
        self._refuse = refuse

    async def watch(self) -> AsyncGenerator[WaitingUpdate, None]:
        """Yield each update that waits; while nobody does this, the engine begins none."""
        call = self._stub.WatchUpdates(pb.WatchUpdatesRequest(server_id=self._id))
        try:
            async for answer in call:
                yield WaitingUpdate(answer.update_id, answer.backend, answer.label, answer.partial)
        except grpc.aio.AioRpcError as error:
            self._refuse(error)
        finally:
            call.cancel()

    async def offer(self, update_id: str, segment_socket: str, offer_id: str) -> list[str]:
        """Have an update's descriptors sent; the bridge looks for the socket beside its own."""
        del segment_socket
        request = pb.OfferUpdateRequest(update_id=update_id, offer_id=offer_id, server_id=self._id)
        return list((await self._call(self._stub.OfferUpdate(request, timeout=_OFFER_S))).files)

    async def end(self, update_id: str, version: int, error: str) -> None:
        request = pb.EndUpdateRequest(
            update_id=update_id, version=version, error=error, server_id=self._id
        )
        await self._call(self._stub.EndUpdate(request, timeout=_END_S))

    async def _call(self, call: Awaitable[_T]) -> _T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            self._refuse(error)


#: Answers that need no engine come within this time, seconds.
_QUICK_S = 5.0
#: A pause or resume that takes longer than its lease fences the engine, and the bridge says so;
#: this much later nobody listens any more. Worker calls alone have no deadline: a cancelled one
#: leaves replies in vLLM's queues.
_GRACE_S = 5.0
#: A resume without a lease, seconds; more than the bridge's own patience.
_RESUME_S = 20.0

_STATES = {
    pb.BRIDGE_STATE_UNRECONCILED: EngineState.UNRECONCILED,
    pb.BRIDGE_STATE_SERVING: EngineState.SERVING,
    pb.BRIDGE_STATE_PAUSED: EngineState.PAUSED,
    pb.BRIDGE_STATE_FENCED: EngineState.FENCED,
    pb.BRIDGE_STATE_DEAD: EngineState.DEAD,
}
_ON_EXPIRY = {
    OnExpiry.RESUME: pb.ON_EXPIRY_RESUME,
    OnExpiry.FENCE: pb.ON_EXPIRY_FENCE,
}


class BridgeEngine:
    """Client of the bridge; implements `weightsync.engine.Engine`.

    `address` is `unix:PATH` of the bridge's socket. Other servers that want the engine name
    `run_dir`, this server's, in their refusals. `updates` is what vLLM receives over a transfer of
    its own.
    """

    def __init__(self, address: str, run_dir: Path | None = None) -> None:
        self._address = address
        #: Names this process in every call: the bridge listens to the one that owns the engine.
        self._id = secrets.token_hex(8)
        self._greeted = ""
        self._resume_s = _RESUME_S
        self._channel = grpc.aio.insecure_channel(
            address,
            options=(
                ("grpc.max_receive_message_length", 64 << 20),
                # A bridge that comes back is found within a second.
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.max_reconnect_backoff_ms", 1000),
            ),
        )
        self._stub = engine_pb2_grpc.EngineServiceStub(self._channel)
        self.updates = BridgeUpdates(self._stub, self._id, self._refuse)
        self._ownership = Ownership(self._stub, self._id, run_dir, self._refuse)

    async def hello(self) -> EngineInfo:
        """Own the engine, compare protocol versions and tell what the engine is.

        ENGINE_OWNED: another server that lives has it. ENGINE_UNSUPPORTED: they speak no common
        protocol; the engine is left to a server that can drive it.
        """
        await self._owned()
        try:
            answer = await self._agree(PROTOCOL_VERSION)
        except WeightSyncError as error:
            # One that only does not answer stays with the server that has it.
            if error.reason is not Reason.ENGINE_AWAY:
                self._ownership.close()
            raise
        self._greeted = answer.engine_id
        return EngineInfo(
            engine_id=answer.engine_id,
            vllm_version=answer.vllm_version,
            ranks=tuple(answer.ranks),
            capabilities=frozenset(answer.capabilities),
            refusals=tuple(answer.refusals),
            state=_STATES[answer.state],
            reason=answer.reason,
            model=answer.model,
            kind="bridge",
            warnings=tuple(answer.warnings),
            open_apply=from_message(answer.open_apply),
            nodes=answer.nodes or 1,
            served_model_name=answer.served_model_name,
        )

    async def _owned(self) -> None:
        try:
            await self._ownership.take(_QUICK_S)
        except grpc.aio.UsageError:
            raise self._left() from None

    async def _agree(self, protocol: int) -> pb.HelloResponse:
        """Say hello in this protocol or, where the bridge does not speak it, in one before."""
        request = pb.HelloRequest(protocol=protocol, server_version=__version__, server_id=self._id)
        try:
            answer = await self._call(self._stub.Hello(request, timeout=_QUICK_S))
        except WeightSyncError as error:
            if error.reason is not Reason.ENGINE_UNSUPPORTED or protocol <= OLDEST_PROTOCOL:
                raise
            return await self._agree(protocol - 1)
        if answer.protocol != protocol:
            raise WeightSyncError(
                Reason.ENGINE_UNSUPPORTED,
                f"the plugin in vLLM speaks protocol {answer.protocol}, this server "
                f"{OLDEST_PROTOCOL} to {PROTOCOL_VERSION}; install the same weightsync release on "
                "both sides",
            )
        return answer

    async def pause(self, spec: PauseSpec, lease_s: float) -> Lease:
        request = pb.PauseRequest(
            mode=spec.mode,
            clear_cache=spec.cache is CacheUse.RECOMPUTE,
            cache=spec.cache,
            wait_timeout=duration(spec.wait_timeout_s),
            after_wait=spec.after_wait,
            lease=duration(lease_s),
            server_id=self._id,
            on_expiry=_ON_EXPIRY[spec.on_expiry],
            apply=to_message(spec.apply),
        )
        self._resume_s = max(lease_s + _GRACE_S, _RESUME_S)
        longest = lease_s + _GRACE_S + (spec.wait_timeout_s if spec.mode == "wait" else 0)
        answer = await self._call(self._stub.Pause(request, timeout=longest))
        return Lease(lease_id=answer.lease_id, mode=answer.mode)

    async def renew(self, lease_id: str, lease_s: float) -> None:
        request = pb.RenewLeaseRequest(
            lease_id=lease_id, lease=duration(lease_s), server_id=self._id
        )
        await self._call(self._stub.RenewLease(request, timeout=_QUICK_S))

    async def resume(self, lease_id: str, version: int, content_digest: str) -> bool:
        request = pb.ResumeRequest(
            lease_id=lease_id,
            version=version,
            content_digest=content_digest,
            server_id=self._id,
        )
        return (await self._call(self._stub.Resume(request, timeout=self._resume_s))).label_set

    async def switch(self, order: SwitchOrder) -> SwitchOutcome:
        request = pb.SwitchRequest(
            apply_id=order.apply_id,
            base_apply_id=order.base_id,
            version=order.version,
            content_digest=order.content_digest,
            base_content_digest=order.base_digest,
            limit=duration(order.limit_s),
            server_id=self._id,
            cache=order.cache,
        )
        answer = await self._call(self._stub.Switch(request))
        replies = [json.loads(reply) for reply in answer.replies_json]
        return SwitchOutcome(replies, answer.serves, answer.label_set)

    async def score(
        self, sequences: Sequence[Sequence[int]], lease_id: str, limit_s: float
    ) -> list[list[float]]:
        request = pb.ScoreRequest(
            sequences=[pb.Sequence(tokens=tokens) for tokens in sequences],
            lease_id=lease_id,
            limit=duration(limit_s),
            server_id=self._id,
        )
        answer = await self._call(self._stub.Score(request, timeout=limit_s + _GRACE_S))
        return [list(scores.logprobs) for scores in answer.scores]

    async def fence(self, reason: str) -> None:
        request = pb.FenceRequest(reason=reason, server_id=self._id)
        await self._call(self._stub.Fence(request, timeout=_QUICK_S))

    async def call_workers(self, method: str, args: Mapping[str, Any]) -> list[dict[str, Any]]:
        request = pb.CallWorkersRequest(
            method=method, args_json=json.dumps(args).encode(), server_id=self._id
        )
        answer = await self._call(self._stub.CallWorkers(request))
        return [json.loads(reply) for reply in answer.replies_json]

    async def offer_checkpoint(self, segment_socket: str, offer_id: str) -> list[str]:
        """Have files sent; the bridge looks for the socket beside its own, as paths differ."""
        del segment_socket
        request = pb.OfferCheckpointRequest(offer_id=offer_id, server_id=self._id)
        return list((await self._call(self._stub.OfferCheckpoint(request, timeout=60))).files)

    async def health(self, newest: int | None = None) -> EngineHealth:
        """Tell how the engine is, and the bridge which version is the newest.

        ENGINE_OWNED: another server that lives has it. ENGINE_AWAY: another had it, and has left;
        say hello again; or that comes first. ENGINE_REFUSED: another drives it now, and the plugin
        in vLLM is too old to tell whether that lives.
        """
        request = pb.HealthRequest(newest_version=newest, reported_by=self._id)
        answer = await self._call(self._stub.Health(request, timeout=_QUICK_S))
        self._ownership.check(answer.owner, answer.engine_id)
        if answer.engine_id == self._greeted and answer.server_id != self._id:
            self._displaced()
        return EngineHealth(
            state=_STATES[answer.state],
            reason=answer.reason,
            engine_id=answer.engine_id,
            requests=answer.requests,
            sleeping=answer.sleeping,
            open_apply=from_message(answer.open_apply),
            cache_key=answer.cache_key,
            cut_requests=answer.cut_requests,
            moved_requests=answer.moved_requests,
            key_move_s=answer.key_move.ToNanoseconds() / 1e9,
        )

    def _displaced(self) -> Never:
        if not self._ownership.known:
            raise WeightSyncError(
                Reason.ENGINE_REFUSED,
                "another weightsync-server took this engine over; stop one of the two servers, "
                "then restart the other",
            )
        self._greeted = ""
        raise WeightSyncError(
            Reason.ENGINE_AWAY,
            "the connection to the engine broke, and the server that took it over has left; this "
            "server takes it back",
            retry_after_s=1.0,
        )

    async def serve_for(self, seconds: float | None) -> None:
        limit = duration(seconds) if seconds is not None else None
        request = pb.HealthRequest(serve_for=limit, server_id=self._id)
        await self._call(self._stub.Health(request, timeout=_QUICK_S))

    async def close(self) -> None:
        """Close the connection; the engine goes on running."""
        self._ownership.close()
        await self._channel.close()

    async def _call(self, call: Awaitable[_T]) -> _T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            self._refuse(error)
        except grpc.aio.UsageError:
            raise self._left() from None

    def _left(self) -> WeightSyncError:
        return WeightSyncError(
            Reason.ENGINE_AWAY, f"the engine at {self._address} has exited; start it again"
        )

    def _refuse(self, error: grpc.aio.AioRpcError) -> Never:
        refusal = from_call(error)
        if refusal is not None:
            raise understood(refusal) from None
        # A refusal of the bridge has a reason. After anything else nobody knows what was done.
        raise WeightSyncError(
            Reason.ENGINE_AWAY,
            f"vLLM does not answer on {self._address} ({error.code().name}); start it with "
            "VLLM_PLUGINS=weightsync and share the socket's folder",
            retry_after_s=1.0,
        ) from None
