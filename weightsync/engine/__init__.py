"""The engine as the server sees it, wherever it runs."""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = [
    "ATTACH",
    "BETWEEN_STEPS",
    "CACHE_LINEAGE",
    "FENCES_ON_EXPIRY",
    "LAYOUT_CHECK",
    "LIMITS_SERVING",
    "OLDEST_PROTOCOL",
    "PAUSED_SCORES",
    "PROTOCOL_VERSION",
    "READ_AHEAD",
    "SCORES",
    "VERSION_LOADS",
    "WEIGHT_UPDATES",
    "CacheUse",
    "Engine",
    "EngineHealth",
    "EngineInfo",
    "EngineState",
    "Lease",
    "OnExpiry",
    "OpenApply",
    "PauseSpec",
    "SwitchOrder",
    "SwitchOutcome",
    "UpdateFeed",
    "WaitingUpdate",
]

#: Versions of `engine.proto` and of what ranks read in shared memory: the newest that server and
#: bridge of this release speak, and the oldest, which is that of the release before. They take the
#: newest that both do.
PROTOCOL_VERSION = OLDEST_PROTOCOL = 2

#: The capability of engines whose ranks hand out their live parameters.
ATTACH = "attaches"

#: The pause mode that needs no pause, and the capability of engines that know it.
BETWEEN_STEPS = "between_steps"

#: The capability of engines whose requests read keys of their present version, or their own.
CACHE_LINEAGE = "cache_lineage"

#: The capability of engines that fence when a pause runs out that says so; others resume.
FENCES_ON_EXPIRY = "fences_on_expiry"

#: The capability of engines that fence themselves when the time is over for which they may serve.
LIMITS_SERVING = "limits_serving"

#: The capability of engines whose ranks tell whether the model takes tensors that are coming.
LAYOUT_CHECK = "checks_layouts"

#: The capability of engines whose ranks read a version while it still comes in.
READ_AHEAD = "reads_arrivals"

#: The capability of engines that score sequences beside generation, and that of those which do so
#: in a pause.
SCORES, PAUSED_SCORES = "scores", "paused_scores"

#: The capability of engines whose ranks can load a version beside generation.
VERSION_LOADS = "loads_versions"

#: The capability of engines that receive weights over a transfer of vLLM's own.
WEIGHT_UPDATES = "weight_updates"


class EngineState(enum.StrEnum):
    """What the engine does, as its adapter knows it."""

    UNRECONCILED = enum.auto()
    """Started and paused; its weights are not yet proved to be a version."""
    SERVING = enum.auto()
    """Generating."""
    PAUSED = enum.auto()
    """Paused under a lease."""
    FENCED = enum.auto()
    """Paused for a reason; requests are refused."""
    DEAD = enum.auto()
    """The engine process is gone."""


class OnExpiry(enum.StrEnum):
    """What an engine does when the lease of a pause runs out."""

    RESUME = enum.auto()
    """It resumes if every rank holds one verified version, and is fenced otherwise."""
    FENCE = enum.auto()
    """It is fenced whatever the ranks hold: others may have decided otherwise."""


@dataclass(frozen=True)
class OpenApply:
    """An apply that others take part in, so that what one engine holds does not decide it.

    Attributes:
        apply_id: Names it in the server's journal, at most 64 bytes.
        base_version: What the engine served before it.
        version: What it shall make live.
    """

    apply_id: str
    base_version: int
    version: int


@dataclass(frozen=True)
class EngineInfo:
    """What an engine is.

    Attributes:
        engine_id: New with every start of the engine.
        vllm_version: Release of vLLM.
        ranks: `dp/pp/tp` in the order of worker replies.
        capabilities: What it can do, such as `weight_version`.
        refusals: Why it is not supported, one sentence each; empty when it is.
        state: What it does now.
        reason: Why it is fenced or dead.
        model: Name or path of the model, for people.
        kind: `bridge` or `embedded`.
        warnings: What makes it less safe than it need be, one sentence each.
        open_apply: That of the last pause with FENCE, until a resume; a fenced engine that has one
            asks for its decision.
        nodes: On how many nodes the ranks are: as many on each, in order, the first here.
        served_model_name: The label `model_name` of vLLM's own metrics; empty: not known.
    """

    engine_id: str
    vllm_version: str
    ranks: tuple[str, ...]
    capabilities: frozenset[str]
    refusals: tuple[str, ...]
    state: EngineState
    reason: str
    model: str
    kind: str
    warnings: tuple[str, ...] = ()
    open_apply: OpenApply | None = None
    nodes: int = 1
    served_model_name: str = ""


class CacheUse(enum.StrEnum):
    """Which keys of the key-value cache are read with new weights.

    RECOMPUTE: None that other weights computed: requests in flight compute theirs again.
    KEEP: Those of a request in flight, by itself.
    SHARE: All that are there, by every request.
    """

    RECOMPUTE = "recompute"
    KEEP = "keep"
    SHARE = "share"


@dataclass(frozen=True)
class PauseSpec:
    """How to pause.

    Attributes:
        mode: `keep`, `wait`, `abort` or `between_steps`, which an engine is not paused for.
        cache: Which cached keys are read afterwards.
        wait_timeout_s: For `wait`: seconds until `after_wait` is done instead.
        after_wait: `keep` or `abort`.
        on_expiry: What the engine does when the lease runs out.
        apply: What the pause is for; FENCE needs it.
    """

    mode: str = "keep"
    cache: CacheUse = CacheUse.RECOMPUTE
    wait_timeout_s: float = 30.0
    after_wait: str = "keep"
    on_expiry: OnExpiry = OnExpiry.RESUME
    apply: OpenApply | None = None


@dataclass(frozen=True)
class Lease:
    """A pause that ends by itself.

    Attributes:
        lease_id: Names it in later calls.
        mode: The mode that was used in the end.
    """

    lease_id: str
    mode: str


@dataclass(frozen=True)
class SwitchOrder:
    """What every rank shall hold after a switch between two steps.

    Attributes:
        apply_id: Its prepared version.
        base_id: The prepared version that every rank holds, and goes back to.
        version: Label of what `apply_id` names.
        content_digest: Its content digest.
        base_digest: That of `base_id`.
        limit_s: How long a rank waits for the others before it ends itself.
        cache: Which cached keys are read afterwards.
    """

    apply_id: str
    base_id: str
    version: int
    content_digest: str
    base_digest: str
    limit_s: float
    cache: CacheUse = CacheUse.KEEP


@dataclass(frozen=True)
class SwitchOutcome:
    """What became of a switch.

    Attributes:
        replies: One per rank, in order.
        serves: Content digest of what the engine serves next; "": not known, the engine is fenced.
        label_set: Whether the engine's own label of the version was set.
    """

    replies: Sequence[Mapping[str, Any]]
    serves: str
    label_set: bool


@dataclass(frozen=True)
class EngineHealth:
    """How the engine is.

    Attributes:
        state: What it does now.
        reason: Why it is fenced or dead.
        engine_id: New with every start of the engine.
        requests: Requests running or waiting.
        sleeping: Whether vLLM's sleep mode holds it.
        open_apply: As in EngineInfo.
        cache_key: Name under which keys are cached now; "": they are not kept apart by version.
        cut_requests: Requests that a switch found with keys, and that keep them for themselves.
        moved_requests: Requests that waited over a switch.
        key_move_s: Seconds that the last move from one key to another took.
    """

    state: EngineState
    reason: str = ""
    engine_id: str = ""
    requests: int = 0
    sleeping: bool = False
    extra: Mapping[str, str] = field(default_factory=dict)
    open_apply: OpenApply | None = None
    cache_key: str = ""
    cut_requests: int = 0
    moved_requests: int = 0
    key_move_s: float = 0.0


@dataclass(frozen=True)
class WaitingUpdate:
    """Weights that have arrived whole over a transfer of vLLM's own, and are no version yet.

    Attributes:
        update_id: Names it in later calls.
        backend: Of the transfer, such as `weightsync_nccl`.
        label: What the trainer calls them; "": nothing.
        partial: Tensors that are not among them stay what they are in what is served.
    """

    update_id: str
    backend: str
    label: str = ""
    partial: bool = False


class UpdateFeed(Protocol):
    """What an engine receives from trainers by itself; methods raise as those of Engine."""

    def watch(self) -> AsyncGenerator[WaitingUpdate, None]:
        """Yield each update that waits; while no caller does this, the engine begins none."""

    async def offer(self, update_id: str, segment_socket: str, offer_id: str) -> list[str]:
        """Send read-only descriptors of an update's files over the segment socket."""

    async def end(self, update_id: str, version: int, error: str) -> None:
        """Answer the trainer: the engine serves the update as `version`, or not, for a reason."""


class Engine(Protocol):
    """One vLLM engine; every method raises ENGINE_AWAY when it cannot be reached."""

    @property
    def updates(self) -> UpdateFeed | None:
        """What it receives by itself; None: nothing, or it does not report WEIGHT_UPDATES."""

    async def hello(self) -> EngineInfo:
        """Compare protocol versions and say what the engine is."""

    async def pause(self, spec: PauseSpec, lease_s: float) -> Lease:
        """Return when generation is paused; the pause ends by itself after `lease_s`.

        Then, with RESUME, the engine resumes if every rank holds one verified version and is fenced
        otherwise. With FENCE it generates nothing until a later `resume`, refuses requests, and
        tells the open apply in `hello` and `health`.
        """

    async def renew(self, lease_id: str, lease_s: float) -> None:
        """Prolong a lease to `lease_s` seconds from now."""

    async def resume(self, lease_id: str, version: int, content_digest: str) -> bool:
        """Start generation on a version that every rank holds; returns whether a label was set."""

    async def switch(self, order: SwitchOrder) -> SwitchOutcome:
        """Change the version between two steps; only with the capability `between_steps`.

        No step is taken on anything but one version that every rank is proved to hold.
        """

    async def score(
        self, sequences: Sequence[Sequence[int]], lease_id: str, limit_s: float
    ) -> list[list[float]]:
        """Return the natural log probability of every token but the first, by sequence.

        They are what the engine computes with what its ranks hold; no other request finds a key of
        theirs. Raises DEADLINE_EXCEEDED if they take longer than `limit_s`.

        Args:
            sequences: At most 64 of 2 to 512 token ids.
            lease_id: Of the pause in which they are scored; only with the capability PAUSED_SCORES.
                Empty: the engine generates, and they run beside all others; with SCORES.
            limit_s: Longest time, in seconds.
        """

    async def fence(self, reason: str) -> None:
        """Keep the engine paused and refuse requests until `resume`."""

    async def call_workers(self, method: str, args: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Run one of our worker methods on every rank; one reply per rank, in order."""

    async def offer_checkpoint(self, segment_socket: str, offer_id: str) -> list[str]:
        """Send descriptors of the engine's checkpoint files over the segment socket."""

    async def health(self, newest: int | None = None) -> EngineHealth:
        """Tell how the engine is.

        Args:
            newest: The newest committed version, for requests that bound their lag; 0: there is
                none. None: the engine keeps what it was told.
        """

    async def serve_for(self, seconds: float | None) -> None:
        """Let the engine serve for so long; then, unless called again, it fences itself.

        What waits for the decision of an open apply is left to its lease, and does not serve after
        it before this is called again. Only with the capability LIMITS_SERVING; others ignore it.

        Args:
            seconds: From now; 0 or less: it is over. None: until another call says otherwise.
        """

    async def close(self) -> None:
        """Let go of the engine; it goes on running unless this process hosts it."""
