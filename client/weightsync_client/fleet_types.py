"""What the client returns of fleets; see `types`."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["FleetMemberReport", "FleetMemberStatus", "FleetOrder", "FleetReport", "FleetStatus"]


class FleetOrder(enum.StrEnum):
    """How the hosts of a fleet change over: all at one decision, or wave by wave."""

    BARRIER = enum.auto()
    ROLLING = enum.auto()


@dataclass(frozen=True, slots=True)
class FleetMemberReport:
    """How far one member has come with an apply.

    Attributes:
        name: Its name.
        wave: Number of the decision that lets it go on, from 1.
        prepared: The version lies ready on every rank.
        ready: It stands still, in a barrier.
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
    """What a fleet has decided, and how far its members have come.

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
        undecided: Members that stand still and do not know the decision.
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
