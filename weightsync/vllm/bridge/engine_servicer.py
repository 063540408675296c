"""EngineService of `engine.proto` over a `VllmEngine`, and which server owns the engine; thin."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.duration_pb2 import Duration

from weightsync import failpoints
from weightsync.engine import (
    OLDEST_PROTOCOL,
    PROTOCOL_VERSION,
    CacheUse,
    EngineState,
    OnExpiry,
    PauseSpec,
    SwitchOrder,
    UpdateFeed,
)
from weightsync.engine.leases import (
    MAX_RUN_DIR_BYTES,
    OWNER_PID,
    from_message,
    owned_by,
    server_of,
    to_message,
)
from weightsync.engine.v1 import engine_pb2 as pb
from weightsync.engine.v1 import engine_pb2_grpc
from weightsync.errors import Reason, WeightSyncError, invalid_request
from weightsync.wire.rpc_status import release_with_call, to_status

if TYPE_CHECKING:
    from weightsync.vllm.bridge.adapter import VllmEngine

logger = logging.getLogger(__name__)


#: How long a newcomer waits for an owner that is about to leave, as when one restarts, seconds.
_LEAVES_S = 0.5
_MAX_ID_BYTES = 64


class EngineOwner:
    """An owner that lives keeps its engine; one that has died is replaced at once.

    The kernel ends the call that an owner keeps open when its process ends. A process that stands
    still lives, and keeps the engine.
    """

    def __init__(self) -> None:
        self.present: pb.Owner | None = None
        self._left = asyncio.Event()

    async def take(self, owner: pb.Owner) -> None:
        """Make a server the owner until `leave`, in place of its own call before, or refuse it."""
        if not 0 < len(owner.server_id.encode()) <= _MAX_ID_BYTES:
            raise _invalid(f"server_id has 1 to {_MAX_ID_BYTES} bytes")
        if len(owner.run_dir.encode()) > MAX_RUN_DIR_BYTES:
            raise _invalid(f"run_dir has at most {MAX_RUN_DIR_BYTES} bytes")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVES_S):
                while self._other(owner.server_id) is not None:
                    await self._left.wait()
        self.check(owner.server_id)
        self.present = owner
        self._left = asyncio.Event()
        logger.info(
            "weightsync: the server with pid %d and run_dir %r owns this engine",
            owner.pid,
            owner.run_dir,
        )

    def leave(self, owner: pb.Owner) -> bool:
        """Take note that a call of an owner has ended; returns whether it was the present one."""
        if self.present is not owner:
            return False
        self.present = None
        self._left.set()
        return True

    def check(self, server_id: str) -> None:
        if other := self._other(server_id):
            raise WeightSyncError(
                Reason.ENGINE_REFUSED, owned_by(other), metadata={OWNER_PID: str(other.pid)}
            )

    def _other(self, server_id: str) -> pb.Owner | None:
        return None if self.present is None or self.present.server_id == server_id else self.present


def _invalid(what: str) -> WeightSyncError:
    return invalid_request(f"the server does not say rightly who owns the engine: {what}")


_Answer = TypeVar("_Answer")

#: Longest JSON argument of a worker call in bytes; more does not fit vLLM's queues well.
MAX_ARGS_BYTES = 64 << 10

_STATES = {
    EngineState.UNRECONCILED: pb.BRIDGE_STATE_UNRECONCILED,
    EngineState.SERVING: pb.BRIDGE_STATE_SERVING,
    EngineState.PAUSED: pb.BRIDGE_STATE_PAUSED,
    EngineState.FENCED: pb.BRIDGE_STATE_FENCED,
    EngineState.DEAD: pb.BRIDGE_STATE_DEAD,
}

_ON_EXPIRY = {
    pb.ON_EXPIRY_UNSPECIFIED: OnExpiry.RESUME,
    pb.ON_EXPIRY_RESUME: OnExpiry.RESUME,
    pb.ON_EXPIRY_FENCE: OnExpiry.FENCE,
}


def _with_status(
    method: Callable[[Any, Any, Any], Awaitable[_Answer]],
) -> Callable[[Any, Any, Any], Awaitable[_Answer]]:
    @functools.wraps(method)
    async def call(self: Any, request: Any, context: Any) -> _Answer:
        try:
            return await method(self, request, context)
        except WeightSyncError as error:
            # Not the error itself: its traceback holds this frame.
            status = to_status(error)
        except Exception as error:
            logger.exception("weightsync: %s failed", method.__name__)
            text = f"the bridge failed ({type(error).__name__}); check vLLM's log"
            status = to_status(WeightSyncError(Reason.FAULT, text))
        try:
            await context.abort_with_status(status)
        except Exception as aborted:
            release_with_call(aborted)
            raise
        raise AssertionError("gRPC went on with a call that was refused")

    return call


class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    """Answers the server's calls; every error is a WeightSyncError with its reason as a detail.

    The server that owns the engine drives it or, where none does, the one that said hello last;
    calls of any other change nothing. A request may name another `segment_socket`.
    """

    def __init__(self, engine: VllmEngine, segment_socket: str) -> None:
        self._engine = engine
        self._segment_socket = segment_socket
        self._driver = ""
        self._owner = EngineOwner()
        self._closed = asyncio.Event()

    def condition(self) -> tuple[EngineState, str]:
        """Return the engine's state and its reason, with the server whose the engine is."""
        state, reason = self._engine.condition()
        owner = self._owner.present
        if reason and owner is not None and state is not EngineState.DEAD:
            reason = f"{reason}; the engine is that of {server_of(owner)}"
        return state, reason

    def close(self) -> None:
        """End the calls that last as long as a server lives."""
        self._closed.set()

    async def Own(self, request: Any, context: Any) -> AsyncIterator[pb.OwnResponse]:
        await self._take(request, context)
        try:
            yield pb.OwnResponse()
            await self._closed.wait()
        finally:
            if self._owner.leave(request.owner) and self._driver == request.owner.server_id:
                # One that lives, and whose connection broke, says hello again.
                self._driver = ""

    @_with_status
    async def _take(self, request: Any, context: Any) -> None:
        await self._owner.take(request.owner)

    @_with_status
    async def Hello(self, request: Any, context: Any) -> pb.HelloResponse:
        if request.protocol not in range(OLDEST_PROTOCOL, PROTOCOL_VERSION + 1):
            raise WeightSyncError(
                Reason.ENGINE_UNSUPPORTED,
                f"the server speaks engine protocol {request.protocol}, the bridge "
                f"{OLDEST_PROTOCOL} to {PROTOCOL_VERSION}; install the same weightsync release on "
                "both sides",
            )
        self._owner.check(request.server_id)
        await failpoints.reach("bridge.hello")
        self._driver = request.server_id
        info = await self._engine.hello()
        release = request.server_version or "of an unknown release"
        logger.info("weightsync: weightsync-server %s connected", release)
        return pb.HelloResponse(
            protocol=request.protocol,
            engine_id=info.engine_id,
            vllm_version=info.vllm_version,
            ranks=info.ranks,
            capabilities=sorted(info.capabilities),
            refusals=info.refusals,
            state=_STATES[info.state],
            reason=info.reason,
            model=info.model,
            warnings=info.warnings,
            open_apply=to_message(info.open_apply),
            nodes=info.nodes,
            served_model_name=info.served_model_name,
        )

    @_with_status
    async def Pause(self, request: Any, context: Any) -> pb.PauseResponse:
        self._check_driver(request)
        spec = PauseSpec(
            mode=request.mode or "keep",
            cache=_cache(request.cache, clear=request.clear_cache),
            wait_timeout_s=_seconds(request.wait_timeout),
            after_wait=request.after_wait or "keep",
            on_expiry=_on_expiry(request.on_expiry),
            apply=from_message(request.apply),
        )
        lease = await self._engine.pause(spec, _seconds(request.lease))
        await failpoints.reach("bridge.paused")
        return pb.PauseResponse(lease_id=lease.lease_id, mode=lease.mode)

    @_with_status
    async def RenewLease(self, request: Any, context: Any) -> pb.RenewLeaseResponse:
        self._check_driver(request)
        await failpoints.reach("bridge.renew")
        seconds = _seconds(request.lease)
        await self._engine.renew(request.lease_id, seconds)
        return pb.RenewLeaseResponse()

    @_with_status
    async def Resume(self, request: Any, context: Any) -> pb.ResumeResponse:
        self._check_driver(request)
        label_set = await self._engine.resume(
            request.lease_id, request.version, request.content_digest
        )
        await failpoints.reach("bridge.resumed")
        return pb.ResumeResponse(label_set=label_set)

    @_with_status
    async def Switch(self, request: Any, context: Any) -> pb.SwitchResponse:
        self._check_driver(request)
        order = SwitchOrder(
            apply_id=request.apply_id,
            base_id=request.base_apply_id,
            version=request.version,
            content_digest=request.content_digest,
            base_digest=request.base_content_digest,
            limit_s=_seconds(request.limit),
            cache=_cache(request.cache, clear=False),
        )
        await failpoints.reach("bridge.switch")
        outcome = await self._engine.switch(order)
        await failpoints.reach("bridge.switched")
        return pb.SwitchResponse(
            replies_json=[json.dumps(reply).encode() for reply in outcome.replies],
            serves=outcome.serves,
            label_set=outcome.label_set,
        )

    @_with_status
    async def Score(self, request: Any, context: Any) -> pb.ScoreResponse:
        self._check_driver(request)
        sequences = [list(one.tokens) for one in request.sequences]
        await failpoints.reach("bridge.score")
        scores = await self._engine.score(sequences, request.lease_id, _seconds(request.limit))
        return pb.ScoreResponse(scores=[pb.Scores(logprobs=one) for one in scores])

    @_with_status
    async def Fence(self, request: Any, context: Any) -> pb.FenceResponse:
        self._check_driver(request)
        await self._engine.fence(request.reason)
        return pb.FenceResponse()

    @_with_status
    async def CallWorkers(self, request: Any, context: Any) -> pb.CallWorkersResponse:
        self._check_driver(request)
        args = _arguments(request.args_json)
        await failpoints.reach("bridge.call")
        replies = await self._engine.call_workers(request.method, args)
        await failpoints.reach("bridge.called")
        return pb.CallWorkersResponse(replies_json=[json.dumps(r).encode() for r in replies])

    @_with_status
    async def OfferCheckpoint(self, request: Any, context: Any) -> pb.OfferCheckpointResponse:
        self._check_driver(request)
        socket = request.segment_socket or self._segment_socket
        files = await self._engine.offer_checkpoint(socket, request.offer_id)
        return pb.OfferCheckpointResponse(files=files)

    async def WatchUpdates(
        self, request: Any, context: Any
    ) -> AsyncIterator[pb.WatchUpdatesResponse]:
        await self._admit(request, context)
        async with contextlib.aclosing(self._updates.watch()) as updates:
            async for update in updates:
                yield pb.WatchUpdatesResponse(
                    update_id=update.update_id,
                    backend=update.backend,
                    label=update.label,
                    partial=update.partial,
                )

    @_with_status
    async def OfferUpdate(self, request: Any, context: Any) -> pb.OfferUpdateResponse:
        self._check_driver(request)
        socket = request.segment_socket or self._segment_socket
        files = await self._updates.offer(request.update_id, socket, request.offer_id)
        return pb.OfferUpdateResponse(files=files)

    @_with_status
    async def EndUpdate(self, request: Any, context: Any) -> pb.EndUpdateResponse:
        self._check_driver(request)
        await self._updates.end(request.update_id, request.version, request.error)
        return pb.EndUpdateResponse()

    @_with_status
    async def _admit(self, request: Any, context: Any) -> None:
        self._check_driver(request)
        _ = self._updates

    @property
    def _updates(self) -> UpdateFeed:
        if self._engine.updates is None:
            raise WeightSyncError(
                Reason.ENGINE_REFUSED, "this engine receives no updates; push a version instead"
            )
        return self._engine.updates

    @_with_status
    async def Health(self, request: Any, context: Any) -> pb.HealthResponse:
        """Do what the engine's driver asks beside it, if anything; tell whether it lives."""
        if self._driver and request.server_id == self._driver:
            limited = request.HasField("serve_for")
            await self._engine.serve_for(_seconds(request.serve_for) if limited else None)
        ours = self._driver and request.reported_by == self._driver
        newest = request.newest_version if ours and request.HasField("newest_version") else None
        health = await self._engine.health(newest)
        return pb.HealthResponse(
            state=_STATES[health.state],
            reason=health.reason,
            engine_id=health.engine_id,
            requests=health.requests,
            sleeping=health.sleeping,
            server_id=self._driver,
            open_apply=to_message(health.open_apply),
            owner=self._owner.present,
            cache_key=health.cache_key,
            cut_requests=health.cut_requests,
            moved_requests=health.moved_requests,
            key_move=_duration(health.key_move_s),
        )

    def _check_driver(self, request: Any) -> None:
        if request.server_id == self._driver:
            return
        self._owner.check(request.server_id)
        if not self._driver:
            raise WeightSyncError(
                Reason.ENGINE_AWAY,
                "this engine restarted, or its server disconnected; call Hello first",
                retry_after_s=1.0,
            )
        raise WeightSyncError(
            Reason.ENGINE_REFUSED,
            "another weightsync-server took this engine over; stop one of the two servers",
        )


def _on_expiry(value: pb.OnExpiry.ValueType) -> OnExpiry:
    if value not in _ON_EXPIRY:
        raise invalid_request(
            f"on_expiry {value} is not known here; install the same weightsync release on both "
            "sides"
        )
    return _ON_EXPIRY[value]


def _cache(text: str, *, clear: bool) -> CacheUse:
    try:
        return CacheUse(text or (CacheUse.RECOMPUTE if clear else CacheUse.KEEP))
    except ValueError:
        raise invalid_request(
            f"cache {text!r} is not known here; install the same weightsync release on both sides"
        ) from None


def _duration(seconds: float) -> Duration:
    result = Duration()
    result.FromNanoseconds(round(seconds * 1e9))
    return result


def _seconds(duration: Duration) -> float:
    return duration.ToTimedelta().total_seconds()


def _arguments(raw: bytes) -> dict[str, Any]:
    if len(raw) > MAX_ARGS_BYTES:
        raise invalid_request(f"the arguments have {len(raw)} bytes; send at most {MAX_ARGS_BYTES}")
    try:
        args = json.loads(raw or b"{}")
    except ValueError:
        args = None
    if not isinstance(args, dict):
        raise invalid_request("args_json must be one JSON object")
    return args
