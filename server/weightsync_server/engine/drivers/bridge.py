"""A vLLM server in another process, reached over the bridge's unix socket."""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING, Any, Never, TypeVar

import grpc

from weightsync import __version__
from weightsync.engine import (
    OLDEST_PROTOCOL,
    PROTOCOL_VERSION,
    EngineHealth,
    EngineInfo,
    EngineState,
    Lease,
    OnExpiry,
    PauseSpec,
    SwitchOrder,
    SwitchOutcome,
)
from weightsync.engine.open_apply import from_message, to_message
from weightsync.engine.v1 import engine_pb2 as pb
from weightsync.engine.v1 import engine_pb2_grpc
from weightsync.errors import Reason, WeightSyncError
from weightsync.wire.rpc_status import from_call
from weightsync_server.engine.drivers.bridge_updates import BridgeUpdates
from weightsync_server.engine.drivers.ownership import Ownership, understood
from weightsync_server.engine.pause_options import duration

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping
    from pathlib import Path

__all__ = ["BridgeEngine"]

_T = TypeVar("_T")

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

    Args:
        address: `unix:PATH` of the bridge's socket.
        run_dir: Of this server, for the sentences of others that want the engine; None: unknown.

    Attributes:
        updates: What vLLM receives over a transfer of its own.
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

        Raises:
            WeightSyncError: ENGINE_OWNED: another server that lives has it. ENGINE_UNSUPPORTED:
                they speak no common protocol; the engine is left to a server that can drive it.
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
        )

    async def _owned(self) -> None:
        try:
            await self._ownership.take(_QUICK_S)
        except grpc.aio.UsageError:
            raise self._left() from None

    async def _agree(self, protocol: int) -> pb.HelloResponse:
        """Say hello in this protocol or, where the bridge does not speak it, in one before.

        Raises:
            WeightSyncError: ENGINE_UNSUPPORTED: the bridge speaks none of this release's.
        """
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
        """Return when generation stands still; the pause ends by itself after `lease_s`."""
        request = pb.PauseRequest(
            mode=spec.mode,
            clear_cache=spec.clear_cache,
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
        """Prolong a lease to `lease_s` seconds from now."""
        request = pb.RenewLeaseRequest(
            lease_id=lease_id, lease=duration(lease_s), server_id=self._id
        )
        await self._call(self._stub.RenewLease(request, timeout=_QUICK_S))

    async def resume(self, lease_id: str, version: int, content_digest: str) -> bool:
        """Start generation on a version that every rank holds."""
        request = pb.ResumeRequest(
            lease_id=lease_id,
            version=version,
            content_digest=content_digest,
            server_id=self._id,
        )
        return (await self._call(self._stub.Resume(request, timeout=self._resume_s))).label_set

    async def switch(self, order: SwitchOrder) -> SwitchOutcome:
        """Change the version between two steps."""
        request = pb.SwitchRequest(
            apply_id=order.apply_id,
            base_apply_id=order.base_id,
            version=order.version,
            content_digest=order.content_digest,
            base_content_digest=order.base_digest,
            limit=duration(order.limit_s),
            server_id=self._id,
        )
        answer = await self._call(self._stub.Switch(request))
        replies = [json.loads(reply) for reply in answer.replies_json]
        return SwitchOutcome(replies, answer.serves, answer.label_set)

    async def fence(self, reason: str) -> None:
        """Keep the engine paused and refuse requests until `resume`."""
        request = pb.FenceRequest(reason=reason, server_id=self._id)
        await self._call(self._stub.Fence(request, timeout=_QUICK_S))

    async def call_workers(self, method: str, args: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Run one of our worker methods on every rank; one reply per rank, in order."""
        request = pb.CallWorkersRequest(
            method=method, args_json=json.dumps(args).encode(), server_id=self._id
        )
        answer = await self._call(self._stub.CallWorkers(request))
        return [json.loads(reply) for reply in answer.replies_json]

    async def offer_checkpoint(self, segment_socket: str, offer_id: str) -> list[str]:
        """Send descriptors of the engine's checkpoint files over the segment socket.

        The bridge looks for the segment socket beside its own: paths differ between containers.
        """
        del segment_socket
        request = pb.OfferCheckpointRequest(offer_id=offer_id, server_id=self._id)
        return list((await self._call(self._stub.OfferCheckpoint(request, timeout=60))).files)

    async def health(self) -> EngineHealth:
        """Tell how the engine is.

        Raises:
            WeightSyncError: ENGINE_OWNED: another server that lives has it. ENGINE_AWAY: another
                had it, and has left; say hello again; or that comes first. ENGINE_REFUSED: another
                drives it now, and the plugin in vLLM is too old to tell whether that lives.
        """
        answer = await self._call(self._stub.Health(pb.HealthRequest(), timeout=_QUICK_S))
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
        )

    def _displaced(self) -> Never:
        if not self._ownership.known:
            raise WeightSyncError(
                Reason.ENGINE_REFUSED,
                "another weightsync-server has taken this engine over; stop one of the two, then "
                "restart the other",
            )
        self._greeted = ""
        raise WeightSyncError(
            Reason.ENGINE_AWAY,
            "the connection to the engine broke, and who had the engine since has left; this "
            "server takes it back",
            retry_after_s=1.0,
        )

    async def serve_for(self, seconds: float | None) -> None:
        """Let the engine serve for so long; then, unless called again, it fences itself."""
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
            Reason.ENGINE_AWAY, f"the engine at {self._address} has left; start it again"
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
