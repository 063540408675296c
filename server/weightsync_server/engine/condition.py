"""How the engine is, as GetStatus, the metrics and refused callers are shown it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable

from weightsync import clock
from weightsync.engine import EngineHealth, EngineInfo
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.engine import replies
from weightsync_server.engine.outcome import PreparedVersion
from weightsync_server.engine.refusals import OUT_OF_REACH
from weightsync_server.engine.version_loads import LoadScheduler
from weightsync_server.ops.metrics import EngineMetrics


class EngineCondition:
    """The state of one engine with its reason; whoever changes it shows it to all.

    `on_change` is called when the engine begins or stops serving one verified version. `info` is
    what the engine said at its last hello, None while it is away. `loaded` is the model of its last
    known start. `reason` is empty while it serves; `refused` says why this start of the engine can
    never be served, and is empty if it can. `owned`: another running server owns it.
    """

    def __init__(self, metrics: EngineMetrics, on_change: Callable[[], None]) -> None:
        self._metrics = metrics
        self._on_change = on_change
        self._fenced = False
        self._cache_key = ""
        self.info: EngineInfo | None = None
        self.loaded = ""
        self.state: pb.EngineState.ValueType = pb.ENGINE_STATE_AWAY
        self.reason = "not connected yet"
        self.refused = ""
        self.owned = False
        #: When it answered last before it went away; 0: not since this server started.
        self._seen_ns = 0
        #: Start of an engine, and how often it was begun to prove what that generates.
        self._proofs = ("", 0)

    @property
    def serving(self) -> bool:
        return self.state in (pb.ENGINE_STATE_SERVING, pb.ENGINE_STATE_APPLYING)

    @property
    def proving(self) -> bool:
        """Whether it generates with what vLLM has loaded, until that is proved."""
        return self.state == pb.ENGINE_STATE_PROVING

    @property
    def proofs(self) -> int:
        """How often it was begun to prove what this start of the engine generates."""
        engine_id, count = self._proofs
        return count if self.info is not None and engine_id == self.info.engine_id else 0

    @property
    def why_unknown(self) -> str:
        """Why the ranks are to be asked what they hold."""
        if self.state != pb.ENGINE_STATE_AWAY:
            return self.reason
        return (
            "the engine answered again" if self._seen_ns else "this server connected to the engine"
        )

    def note(self, health: EngineHealth) -> None:
        """Take over what a look at the engine shows of its requests and their keys."""
        self._cache_key = health.cache_key
        self._metrics.count_requests(health)

    def begin_proof(self) -> None:
        engine_id = self.info.engine_id if self.info is not None else ""
        self._proofs = engine_id, self.proofs + 1
        self.set(
            pb.ENGINE_STATE_PROVING, "what vLLM has loaded is compared with a second load of it"
        )

    def set(self, state: pb.EngineState.ValueType, reason: str) -> None:
        self.state, self.reason, self.owned = state, reason, False
        # A fence stays in the metric while it is tried to lift it.
        if state != pb.ENGINE_STATE_RECONCILING:
            self._fenced = state == pb.ENGINE_STATE_FENCED
        self._metrics.set_engine(
            up=state != pb.ENGINE_STATE_AWAY, fenced=self._fenced, serving=self.serving
        )
        self._on_change()

    def fail(self, error: WeightSyncError) -> None:
        away = error.reason in OUT_OF_REACH
        self.set(pb.ENGINE_STATE_AWAY if away else pb.ENGINE_STATE_FENCED, error.message)
        self.owned = error.reason is Reason.ENGINE_OWNED
        if error.reason is Reason.ENGINE_UNSUPPORTED:
            self.refused = error.message

    def forget(self) -> None:
        if self.info is not None:
            self._seen_ns = clock.wall_ns()
        self.info = None
        self.refused = ""
        self._metrics.set_served({})

    def status(self, live: PreparedVersion | None, loads: LoadScheduler | None) -> pb.EngineStatus:
        """Return what GetStatus shows; `live` None: nobody knows what every rank holds."""
        info = self.info
        status = pb.EngineStatus(
            state=self.state,
            reason=self.reason,
            engine_id=info.engine_id if info else "",
            vllm_version=info.vllm_version if info else "",
            kind=info.kind if info else "",
            ranks=replies.current_ranks(live, loads),
            capabilities=sorted(info.capabilities) if info else [],
            warnings=info.warnings if info else [],
            cache_key=self._cache_key if info else "",
        )
        if self.owned:
            # It answers, but not to this server.
            return status
        if self.state == pb.ENGINE_STATE_AWAY and self._seen_ns:
            status.last_seen.FromNanoseconds(self._seen_ns)
            seen = dt.datetime.fromtimestamp(self._seen_ns / 1e9, dt.UTC)
            status.reason += f"; it last answered at {seen:%Y-%m-%d %H:%M:%S} UTC"
        elif self.state == pb.ENGINE_STATE_AWAY:
            status.reason += "; it has not answered since this server started"
        return status

    def unavailable(self, retry_s: float) -> WeightSyncError:
        """Return the refusal of a call for an engine that does not serve, with what to do."""
        if self.state == pb.ENGINE_STATE_FENCED:
            remedy = (
                "restart vLLM with what the reason names"
                if self.refused
                else f"the server tries again every {retry_s:g} s; restart vLLM if this persists"
            )
            return WeightSyncError(
                Reason.ENGINE_FENCED, f"the engine is fenced ({self.reason}); {remedy}"
            )
        if self.owned:
            return WeightSyncError(Reason.ENGINE_OWNED, self.reason)
        return WeightSyncError(
            Reason.ENGINE_AWAY,
            f"the engine is not ready ({self.reason}); it is connected as soon as it answers",
            retry_after_s=1.0,
        )
