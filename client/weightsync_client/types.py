"""What the client returns: frozen dataclasses, durations in seconds, digests as 32 hex digits.

One file: users import them from one place, and most refer to each other.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from datetime import datetime

from weightsync_client.gate import GateReport
from weightsync_client.push_reasons import Fallback, Streamed, TransferPath


@dataclass(frozen=True, slots=True)
class ClientRun:
    """A run of a client that pushed: its newest version, how many exist, and whose the epoch is."""

    client_run: str
    newest_version: int
    versions: int
    has_epoch: bool


class Transform(enum.StrEnum):
    """What leads to a rank's live bytes: copies by the load plan, or a load beside generation."""

    UNSPECIFIED = enum.auto()
    PLAN = enum.auto()
    TWIN = enum.auto()


class LoaderState(enum.StrEnum):
    """What the loader of a rank does; UNSPECIFIED: it has none."""

    UNSPECIFIED = enum.auto()
    STARTING = enum.auto()
    PROVING = enum.auto()
    READY = enum.auto()
    LOADING = enum.auto()
    FAILED = enum.auto()


@dataclass(frozen=True, slots=True)
class LoaderStatus:
    """The loader of a rank whose versions are loaded beside generation.

    Attributes:
        version: What it loads, or loaded last; 0: none.
        percent: How much of its present phase is done.
        arena_bytes: Memory that holds what it loaded.
        restarts: How often a loader had to be started again.
        last_error: Why the last load failed; empty: it did not.
        load_s: How long the last load took.
    """

    state: LoaderState
    version: int
    percent: int
    arena_bytes: int
    restarts: int
    last_error: str
    load_s: float


@dataclass(frozen=True, slots=True)
class RankResult:
    """What one rank reports.

    Attributes:
        rank: Data, pipeline and tensor parallel rank, as dp/pp/tp.
        version: What its live parameters hold; 0: no whole version.
        content_digest: What its live parameters were proved to hold; empty: nothing.
        error: Why it refused or failed; empty: it did not.
        h2d_bytes: Bytes sent to its device for this version.
        device_room_bytes: Memory of its device that it may take to stage versions.
        device_used_bytes: Memory of its device that it has taken, scratch included.
        transform: How versions become live on it.
        transform_reason: Why that is not the plan; empty: it is, or the reason is no longer known.
        loader: Its loader; None: it has none.
    """

    rank: str
    version: int
    content_digest: str
    written_bytes: int
    commit_s: float
    verify_s: float
    error: str
    h2d_bytes: int = 0
    device_room_bytes: int = 0
    device_used_bytes: int = 0
    transform: Transform = Transform.UNSPECIFIED
    transform_reason: str = ""
    loader: LoaderStatus | None = None


class EngineOrder(enum.StrEnum):
    """In which order the engines of a host take a version: all in one pause, or in turn."""

    UNSPECIFIED = enum.auto()
    TOGETHER = enum.auto()
    ROLLING = enum.auto()


class EngineState(enum.StrEnum):
    """What the server is doing with the engine."""

    UNSPECIFIED = enum.auto()
    AWAY = enum.auto()
    RECONCILING = enum.auto()
    SERVING = enum.auto()
    APPLYING = enum.auto()
    FENCED = enum.auto()
    PROVING = enum.auto()


class RunningPhase(enum.StrEnum):
    """What an apply does with an engine while it runs."""

    UNSPECIFIED = enum.auto()
    #: Every rank maps and matches the version, while generation runs.
    PREPARE = enum.auto()
    PAUSE = enum.auto()
    #: Every rank writes the version and proves what it holds then.
    COMMIT = enum.auto()
    RESUME = enum.auto()
    #: For other engines or the fleet, or it has done its part.
    WAIT = enum.auto()
    #: The apply has failed, and the engine goes back to the version before.
    RESTORE = enum.auto()
    #: The probes of the version are scored.
    SCORE = enum.auto()


@dataclass(frozen=True, slots=True)
class RunningApply:
    """An apply that runs now, as it concerns one engine.

    Attributes:
        apply_id: The attempt, as in logs.
        version: The version to become live; 0: it is not chosen yet.
        previous_version: What is live on the engine until then.
        began: When it took the engine, `took_s` seconds ago.
        phase_began: When the phase began, `in_phase_s` seconds ago.
        pending_ranks: In PREPARE, the ranks that have not finished; empty: that is not known.
    """

    apply_id: str
    engine: str
    version: int
    previous_version: int
    phase: RunningPhase
    began: datetime | None
    took_s: float
    phase_began: datetime | None
    in_phase_s: float
    pending_ranks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """An engine beside the server; `reason` says why it is fenced or away.

    Attributes:
        warnings: What makes its vLLM less safe than it need be.
        name: The file name of its socket without `.sock`, or how the server was configured to make
            it; empty: the server is an earlier one, which reports none of the following either.
        live_version: What every rank serves; 0: not known.
        rollback_version: What a rollback of this engine would go to; 0: none.
        rollback_resident: That is in memory, and where versions are loaded, loaded.
        apply_id: Apply in progress; empty: none.
        last_seen: While it is away: when it last answered; None: not since the server started.
        running_apply: How far that apply is; None: there is none, or it is a trainer's transaction.
        cache_key: Name under which vLLM caches keys of what is live, the cache salt of a request
            without one; empty: keys are not kept apart by version.
        gate: What the last gate has shown since the server started; None: there was none.
    """

    state: EngineState
    reason: str
    engine_id: str
    vllm_version: str
    kind: str
    ranks: tuple[RankResult, ...]
    capabilities: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    name: str = ""
    live_version: int = 0
    live_content_digest: str = ""
    rollback_version: int = 0
    rollback_resident: bool = False
    apply_id: str = ""
    last_seen: datetime | None = None
    running_apply: RunningApply | None = None
    cache_key: str = ""
    gate: GateReport | None = None


@dataclass(frozen=True, slots=True)
class EngineProof:
    """Whether every rank's live parameters hold exactly the version, on the engine so named."""

    engine: str
    verified: bool
    version: int
    ranks: tuple[RankResult, ...]
    absent: str = ""
    """Why it was not asked: it serves nothing, and counts for nothing in the whole."""
    gate: GateReport | None = None
    """What scoring its probes has shown, where that was asked for."""


class Durability(enum.StrEnum):
    """Whether a version survives a crash of the server."""

    UNSPECIFIED = enum.auto()
    RECEIVING = enum.auto()
    COMMITTED = enum.auto()
    FAILED = enum.auto()


class Residency(enum.StrEnum):
    """Whether a version is in the server's shared memory, or in an engine's own alone."""

    UNSPECIFIED = enum.auto()
    ABSENT = enum.auto()
    STAGING = enum.auto()
    STAGED = enum.auto()
    DEVICE = enum.auto()


class Serving(enum.StrEnum):
    """Whether the engine serves a version; HELD: its gate kept it from that."""

    UNSPECIFIED = enum.auto()
    NO = enum.auto()
    LIVE = enum.auto()
    REJECTED = enum.auto()
    HELD = enum.auto()


class PauseMode(enum.StrEnum):
    """What happens to requests in flight when generation pauses; BETWEEN_STEPS pauses nothing."""

    UNSPECIFIED = enum.auto()
    KEEP = enum.auto()
    WAIT = enum.auto()
    ABORT = enum.auto()
    BETWEEN_STEPS = enum.auto()


class CacheMode(enum.StrEnum):
    """Which keys that were computed under the old weights are read afterwards.

    RECOMPUTE: none. KEEP: those of a request in flight, by itself. SHARE: all, by every request.
    """

    UNSPECIFIED = enum.auto()
    RECOMPUTE = enum.auto()
    KEEP = enum.auto()
    SHARE = enum.auto()


class ApplyOutcome(enum.StrEnum):
    """How an apply ended."""

    UNSPECIFIED = enum.auto()
    APPLIED = enum.auto()
    ALREADY_LIVE = enum.auto()
    PLANNED = enum.auto()


class ApplyStrategy(enum.StrEnum):
    """How an apply writes: all parameters, what differs, or by exchange with what was loaded."""

    UNSPECIFIED = enum.auto()
    COPY = enum.auto()
    PATCH = enum.auto()
    TWIN = enum.auto()


class LayoutCheck(enum.StrEnum):
    """Whether the engine was asked if it takes a version's tensors, when their layout arrived."""

    UNSPECIFIED = enum.auto()
    UNCHECKED = enum.auto()
    PASSED = enum.auto()


class LiveCheck(enum.StrEnum):
    """Whether the live parameters were compared with the version as a whole."""

    UNSPECIFIED = enum.auto()
    PENDING = enum.auto()
    PASSED = enum.auto()
    FAILED = enum.auto()


class PushKind(enum.StrEnum):
    """Whether every tensor is sent or kept in full, or what changed since a base version."""

    UNSPECIFIED = enum.auto()
    FULL = enum.auto()
    DELTA = enum.auto()


@dataclass(frozen=True, slots=True)
class PushResult:
    """A committed version.

    Attributes:
        durable: False with the store memory://: the version lives as long as the server.
        already: True when an earlier push had committed the same content.
        sent_bytes: Bytes that this push sent, bytes sent again after a cut included.
        seconds: From the call until the commit was acknowledged.
        kind: Whether all was sent, or what changed since `base_version`.
        fallback_reason: Why all was sent instead of a delta; empty: no delta was asked for.
        base_version: Of a delta; 0: a push in full.
        changed_fraction: Share of the elements that changed; None: not known, as in a push in full.
        dense_bytes: Bytes of the whole version in full, with which `sent_bytes` compares.
        way: How the bytes went; SAME_HOST if any shard was written into the server's memory.
        way_reason: Why they, or some of them, were sent over the link, or with SAME_HOST went
            through this process where the server could have copied them; empty: neither.
        cast: Tensors that were cast to the dtype that the engine has.
        other_run: Another run, which pushed `other_version`, the version before; empty: none did.
        runs_alternate: True when this run had pushed before it: two trainers push in turn.
    """

    version: int
    content_digest: str
    manifest_digest: str
    durable: bool
    already: bool
    size_bytes: int
    tensor_count: int
    sent_bytes: int
    seconds: float
    kind: PushKind = PushKind.FULL
    fallback_reason: Fallback | str = ""
    base_version: int = 0
    changed_fraction: float | None = None
    dense_bytes: int = 0
    way: TransferPath = TransferPath.STREAM
    way_reason: Streamed | str = ""
    cast: int = 0
    other_run: str = ""
    other_version: int = 0
    runs_alternate: bool = False


@dataclass(frozen=True, slots=True)
class Phases:
    """How long each phase of an apply took; `score_s` is that of the gate in the pause."""

    prepare_s: float
    pause_s: float
    commit_s: float
    verify_s: float
    resume_s: float
    paused_total_s: float
    score_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PauseUsed:
    """How generation was paused, the server's defaults filled in."""

    mode: PauseMode
    cache: CacheMode
    wait_timeout_s: float
    after_wait: PauseMode


@dataclass(frozen=True, slots=True)
class ApplyPlan:
    """What an apply would do.

    Attributes:
        predicted_pause_s: Time without generation; 0: never measured.
        rollback_resident: A rollback afterwards reads nothing from the store and loads nothing.
    """

    write_bytes: int
    predicted_pause_s: float
    memory_bytes: int
    read_from_store: bool
    strategy: ApplyStrategy
    rollback_resident: bool = False


@dataclass(frozen=True, slots=True)
class ApplyReport:
    """What an apply did.

    `plan` is set for a dry run, `previous_version` 0 means none, and `durability` is RECEIVING when
    a version was applied before its commit, as the caller had asked. Of several engines `ranks` is
    empty, bytes are sums, times those of the slowest; `engines` has what became of each engine of
    the host, or of the one that was named. `gate` is what scoring its probes has shown, None if
    they were not scored.
    """

    apply_id: str
    outcome: ApplyOutcome
    version: int
    content_digest: str
    previous_version: int
    phases: Phases
    written_bytes: int
    ranks: tuple[RankResult, ...]
    pause: PauseUsed
    plan: ApplyPlan | None = None
    durability: Durability = Durability.UNSPECIFIED
    strategy: ApplyStrategy = ApplyStrategy.UNSPECIFIED
    engines: tuple[EngineReport, ...] = ()
    gate: GateReport | None = None


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What became of one engine in an apply or a rollback.

    Attributes:
        engine: Its name.
        report: What was done; None: it took no part.
        absent: Why it took no part; it is brought to its host's version before it serves.
    """

    engine: str
    report: ApplyReport | None
    absent: str = ""


@dataclass(frozen=True, slots=True)
class RollbackReport:
    """What a rollback did; `rejected_version` is the one that was left, 0: it stays allowed."""

    report: ApplyReport
    rejected_version: int


class ApplyKind(enum.StrEnum):
    """What was to happen, in the record of an apply."""

    UNSPECIFIED = enum.auto()
    APPLY = enum.auto()
    ROLLBACK = enum.auto()
    #: A trainer's transaction.
    IN_PLACE = enum.auto()
    #: The server found or placed a version by itself.
    RECOVERY = enum.auto()
    #: A host's part in an apply of its fleet.
    MEMBER = enum.auto()
    FLEET_APPLY = enum.auto()
    FLEET_ROLLBACK = enum.auto()


class ApplyResult(enum.StrEnum):
    """How an apply ended, in its record."""

    UNSPECIFIED = enum.auto()
    APPLIED = enum.auto()
    ALREADY_LIVE = enum.auto()
    PLANNED = enum.auto()
    #: Nothing was paused or written.
    REFUSED = enum.auto()
    #: It failed, and the engines serve what they served before.
    RESTORED = enum.auto()
    #: It failed, and an engine is fenced.
    FENCED = enum.auto()
    #: It had begun, and the ranks were asked afterwards what they hold.
    INTERRUPTED = enum.auto()


@dataclass(frozen=True, slots=True)
class SlowestRank:
    """The rank that took longest to write and prove a version."""

    engine: str
    rank: str
    commit_s: float
    verify_s: float


@dataclass(frozen=True, slots=True)
class ApplyRecord:
    """One apply that has ended, as the server remembers it.

    Attributes:
        number: Rises with each record, also over restarts of the server.
        time: When it began.
        took_s: Seconds until it ended, with the wait for the engines.
        requested_by: The principal, or the host or socket of a caller without one; "server" or
            "fleet NAME" if none called.
        cause: The reason given for a rollback, or why the server acted by itself.
        version: The version to become live; 0: none was chosen.
        content_digest: Its digest; empty if it did not become live.
        previous_version: The version that was live before; 0: none, or several.
        reason: Why it was refused or failed; empty otherwise.
        error_reason: The stable reason of that error; empty otherwise.
        order: Of several engines.
        engine: The engine that was named; empty: all of the host.
        fleet_apply: Number of the apply in the fleet; 0: none, or not known.
        apply_id: The attempt, as in logs; empty: nothing was begun.
        phases: How long each phase took; None: it was not carried out, or it failed.
        written_bytes: Summed over ranks and engines.
        pause: How generation was paused; None: as `phases`.
        slowest: The slowest rank; None: as `phases`.
        engines: Each engine that took part, or why it did not.
        times: How often in a row the caller was answered the same, without any change.
        gate: What scoring its probes has shown, also where that undid the apply; None: they were
            not scored.
    """

    number: int
    time: datetime | None
    took_s: float
    kind: ApplyKind
    requested_by: str
    cause: str
    version: int
    content_digest: str
    previous_version: int
    result: ApplyResult
    reason: str
    error_reason: str
    order: EngineOrder
    engine: str
    fleet_apply: int
    apply_id: str
    phases: Phases | None
    written_bytes: int
    strategy: ApplyStrategy
    pause: PauseUsed | None
    slowest: SlowestRank | None
    engines: tuple[EngineReport, ...]
    times: int
    gate: GateReport | None = None


@dataclass(frozen=True, slots=True)
class Version:
    """One version of a model.

    Attributes:
        rejected_reason: Why it is rejected; empty: it is not.
        content_digest: Its identity; empty while it is being received, as are the other digests.
        epoch: Of its writer; 0: adopted from the engine.
        trainer_verified: True when the trainer's own digests were compared at the push.
        kind: How the store keeps it; a delta is folded into a full version in time.
        base_version: For a delta: the version that it is based on.
        stored_bytes: Bytes that the store keeps of it.
        chain_length: Deltas from the nearest full version to this one; 0: it is full.
        changed_fraction: Share of the elements that a delta changed.
        layout_check: Whether the engine takes its tensors.
        live_check: Whether its live parameters were compared as a whole.
        live_check_time: When they were.
        client_run: The client run that pushed it; empty: unknown, or it was not pushed.
        probe_count: Sequences that the gate of an apply scores; 0: it came without probes.
    """

    model: str
    version: int
    durability: Durability
    residency: Residency
    serving: Serving
    rejected_reason: str
    content_digest: str
    manifest_digest: str
    layout_digest: str
    size_bytes: int
    tensor_count: int
    shard_count: int
    epoch: int
    commit_time: datetime | None
    metadata: dict[str, str]
    pinned: bool
    trainer_verified: bool
    kind: PushKind = PushKind.UNSPECIFIED
    base_version: int = 0
    stored_bytes: int = 0
    chain_length: int = 0
    changed_fraction: float = 0.0
    live_check: LiveCheck = LiveCheck.UNSPECIFIED
    live_check_time: datetime | None = None
    layout_check: LayoutCheck = LayoutCheck.UNSPECIFIED
    client_run: str = ""
    probe_count: int = 0


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a version; begin and end count from the start of its shard's data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: int
    begin: int
    end: int
    digest: str


@dataclass(frozen=True, slots=True)
class VersionChange:
    """A version as it is now.

    Attributes:
        revision: Rises with every change of one life of the server.
        initial: True on changes that give the state at the beginning, or after a new connection.
    """

    version: Version
    revision: int
    deleted: bool
    initial: bool


@dataclass(frozen=True, slots=True)
class Verification:
    """Whether every rank's live parameters hold exactly this version.

    Of several engines `ranks` is empty and `engines` has what each found; `version` is 0 where they
    do not serve the same one.
    """

    verified: bool
    version: int
    content_digest: str
    ranks: tuple[RankResult, ...]
    engines: tuple[EngineProof, ...] = ()


@dataclass(frozen=True, slots=True)
class PullResult:
    """A version that is now in a folder, every digest compared."""

    version: Version
    files: tuple[str, ...]
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """One slot: the shared memory of one resident version (0: none)."""

    slot: int
    version: int
    state: str
    reserved_bytes: int
    used_bytes: int
    leases: int


@dataclass(frozen=True, slots=True)
class PushStatus:
    """An open push; `layout_check` says whether the engine takes its tensors.

    Of `writers` processes that bring it together some have not begun (`absent_writers`), others
    have and did not ask for the commit yet; at most 100 of each are listed. 0: one sends it alone.
    """

    push_id: str
    version: int
    received_bytes: int
    declared_bytes: int
    streams: int
    layout_check: LayoutCheck = LayoutCheck.UNSPECIFIED
    writers: int = 0
    absent_writers: tuple[int, ...] = ()
    unfinished_writers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model; a version of 0 and an empty digest mean none, or not the same on every engine.

    `engine` is the only engine, or the first by name that does not serve, else the first;
    `engines` has all that the host has, and is empty for an earlier server. `client_runs` are who
    pushed the versions, newest first. `live_age_s` and `newest_age_s` are seconds since the commit
    of a version, None where there is none. `newest_not_live` says why the newest version is not
    live and what to do; empty: it is. `last_apply` is the last one that changed something or
    failed, without its engines. `running_apply` is the one that runs now, on the engine that the
    others wait for.
    """

    model: str
    live_version: int
    live_content_digest: str
    rollback_version: int
    rollback_resident: bool
    newest_version: int
    epoch: int
    engine: EngineStatus
    slots: tuple[SlotStatus, ...]
    pushes: tuple[PushStatus, ...]
    apply_id: str
    engines: tuple[EngineStatus, ...] = ()
    client_runs: tuple[ClientRun, ...] = ()
    live_age_s: float | None = None
    newest_age_s: float | None = None
    newest_not_live: str = ""
    last_apply: ApplyRecord | None = None
    running_apply: RunningApply | None = None


@dataclass(frozen=True, slots=True)
class DiskStatus:
    """A folder that the server or vLLM writes to.

    Attributes:
        folder: What is in it: "store", "state", "checkpoints", or "shm", which vLLM's processes
            share.
        path: Where it is, as the server sees it.
        free_bytes: What can still be written to its disk.
        used_bytes: What is in use on its disk.
        error: Why nothing more is written there, with the remedy; empty: there is room.
    """

    folder: str
    path: str
    free_bytes: int
    used_bytes: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a server."""

    server_version: str
    start_time: datetime | None
    models: tuple[ModelStatus, ...]
    memory_reserved_bytes: int
    memory_limit_bytes: int
    fetchers: int
    store: str
    durable: bool
    invariant_violations: dict[str, int] = field(default_factory=dict)
    ingest_processes: int = 0
    disks: tuple[DiskStatus, ...] = ()
    uptime_s: float = 0.0


class FleetOrder(enum.StrEnum):
    """How the hosts of a fleet change over: all at one decision, or wave by wave."""

    BARRIER = enum.auto()
    ROLLING = enum.auto()
    #: Nobody knows any more, of an apply that was long ago.
    UNSPECIFIED = enum.auto()


@dataclass(frozen=True, slots=True)
class FleetMemberReport:
    """How far one member is with an apply.

    Attributes:
        name: Its name.
        wave: Number of the decision that lets it go on, from 1.
        prepared: The version lies ready on every rank.
        ready: It is paused, in a barrier.
        done: The version is live.
        reason: What it could not do, and why; empty: nothing failed.
    """

    name: str
    wave: int
    prepared: bool
    ready: bool
    done: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FleetReport:
    """What a fleet has decided, and how far its members are.

    Attributes:
        apply: Number of the apply in the fleet.
        version: The version that it was about.
        content_digest: Digest of its content.
        decision: COMMIT, ABORT, or empty while it is not decided.
        reason: Why, where it is ABORT.
        order: How the members change over.
        decisions: How many were made.
        decisions_needed: How many it takes: one a wave, and one more of a rolling apply.
        members: Every member of it, in the order of their names.
        rollback_reason: Why a rollback was asked for; empty: it is none, or its caller did not say.
        fenced_others: Members that are fenced now and no part of it, in the order of their names.
    """

    apply: int
    version: int
    content_digest: str
    decision: str
    reason: str
    order: FleetOrder
    decisions: int
    decisions_needed: int
    members: tuple[FleetMemberReport, ...]
    rollback_reason: str = ""
    fenced_others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FleetMemberStatus:
    """A member, as it says of itself.

    Attributes:
        name: Its name.
        address: Where its server listens.
        live_version: What its engines hold; 0: nothing, or different versions.
        content_digest: Digest of that.
        state: serving, paused or fenced.
        release: Of its server; empty: one that does not say.
        older: It is of an older release than the member that answers: plans that only newer ones
            can read, it refuses.
        reason: Why it serves nothing, where it is fenced: one sentence, cut after 200 bytes.
    """

    name: str
    address: str
    live_version: int
    content_digest: str
    state: str
    release: str = ""
    older: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """The state of a fleet.

    Attributes:
        fleet: Its name.
        register: Where it decides.
        member: Name of the member that answers.
        members: Those that are there, in the order of their names.
        newest: The newest apply; None: there was none yet.
        decided_version: What every member is to serve; 0: nothing was decided.
        decided_digest: Digest of that.
        skew: By how many commits the member that is furthest behind is behind.
        undecided: Members that are paused and do not know the decision.
        read_age_s: How long ago the answering member read the register; None: not since it started.
    """

    fleet: str
    register: str
    member: str
    members: tuple[FleetMemberStatus, ...]
    newest: FleetReport | None
    decided_version: int
    decided_digest: str
    skew: int
    undecided: int
    read_age_s: float | None
