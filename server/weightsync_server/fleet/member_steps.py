"""What a member does next, as a function of what it has read and what it is: no time, no effect."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightsync_server.fleet.fleet_plan import ApplyPhase, Kind, MemberReport, Verdict

if TYPE_CHECKING:
    from weightsync.engine import PauseSpec
    from weightsync_server.fleet.fleet_history import Apply, History
    from weightsync_server.fleet.fleet_plan import FleetVersion

__all__ = [
    "Abort",
    "Accept",
    "Commit",
    "Fence",
    "MemberState",
    "Mode",
    "PauseHost",
    "Prepare",
    "Reject",
    "Resume",
    "Say",
    "Step",
    "Wait",
    "next_step",
]


class Mode(enum.StrEnum):
    """What a host does, by its member's will."""

    SERVING = "serving"
    #: Stands still in a barrier, and waits for the decision.
    PAUSED = "paused"
    #: Serves nothing: it has not asked yet what to serve, or must not serve what it has.
    FENCED = "fenced"


@dataclass(frozen=True)
class Prepare:
    """Have a version ready, to be changed over to in one way."""

    target: FleetVersion
    pause: PauseSpec | None = None


@dataclass(frozen=True)
class MemberState:
    """What a member knows of itself.

    Attributes:
        name: Its name.
        live: What its host holds.
        mode: What its host does.
        unasked: Its process is new and has not stopped the host: engines that generate go on.
        prepared: What its host has ready, and how it would change over.
        failed: What its host could not prepare or commit; cleared after a while.
        why: Why not.
        said: Reports that are in the register.
        rejected: Digests that its host has been made to reject.
        accepted: Digests that its host has been made to accept again.
        undecided: It stands still, and has for longer than it may.
        stale: What it has read is older than it may be while it serves.
        alone: The coordinator of the running apply is gone.
        displaced: Another process has its name, and is the one that others count.
        ill: Why it takes part in no apply; "": it does.
    """

    name: str
    live: FleetVersion | None = None
    mode: Mode = Mode.SERVING
    unasked: bool = False
    prepared: Prepare | None = None
    failed: FleetVersion | None = None
    why: str = ""
    said: frozenset[tuple[int, ApplyPhase]] = frozenset()
    rejected: frozenset[str] = frozenset()
    accepted: frozenset[str] = frozenset()
    undecided: bool = False
    stale: bool = False
    alone: bool = False
    displaced: bool = False
    ill: str = ""


@dataclass(frozen=True)
class Wait:
    """Nothing, until something changes."""


@dataclass(frozen=True)
class Say:
    """MemberReport on a phase of an apply."""

    number: int
    phase: ApplyPhase
    report: MemberReport


@dataclass(frozen=True)
class PauseHost:
    """Stand still for a barrier."""

    number: int


@dataclass(frozen=True)
class Commit:
    """Make what is prepared live."""

    target: FleetVersion


@dataclass(frozen=True)
class Resume:
    """Serve what is live."""


@dataclass(frozen=True)
class Fence:
    """Serve nothing."""

    reason: str


@dataclass(frozen=True)
class Reject:
    """Never take a content again."""

    digest: str
    reason: str = ""


@dataclass(frozen=True)
class Accept:
    """Take a content again that was rejected."""

    digest: str


@dataclass(frozen=True)
class Abort:
    """Try to decide that an apply is not to be."""

    number: int
    step: int
    reason: str


Step = Wait | Prepare | Say | PauseHost | Commit | Resume | Fence | Reject | Accept | Abort


def next_step(state: MemberState, history: History | None, max_skew: int = 1) -> Step:
    """Return what a member does next.

    It goes to what the fleet has decided, unless it takes part in an apply that is not; it serves
    an older version only where the limits let it.

    Args:
        state: Of the member.
        history: As it was last read; None: never, since this process began.
        max_skew: By how many rolling commits a host that serves may be behind.
    """
    if state.undecided and state.mode is Mode.PAUSED:
        return Fence("the decision on a barrier could not be learnt in time; it is asked for still")
    if state.stale and (state.unasked or state.mode is Mode.SERVING):
        return Fence("the fleet's register was not read for longer than max_age_s; check it")
    if state.displaced and (state.unasked or state.mode is not Mode.FENCED):
        return Fence(f"another server is member {state.name} now; give each --fleet-member a name")
    if history is None or state.stale or state.displaced:
        return Wait()
    if history.unreadable_commits and (state.unasked or state.mode is Mode.SERVING):
        number = history.unreadable_number
        return Fence(f"apply {number} was decided, and cannot be read: {history.unreadable}")
    if history.unreadable:
        return _refuse(state, history)
    apply = history.running
    if apply is not None and apply.plan.wave_of(state.name):
        # What was decided before it comes first, or else it is served until this one ends.
        behind = state.live is not None and _is_behind(state, history, max_skew)
        return _left_behind(apply.plan.previous) if behind else _take_part(state, apply)
    return _settle(state, history, max_skew)


def _is_behind(state: MemberState, history: History, max_skew: int) -> bool:
    """Return whether a host serves what it must not serve any more."""
    # What is decided may be of a commit that cannot be read, and so is missed by whoever serves it.
    if state.mode is not Mode.SERVING or state.live == history.target:
        return False
    missed = history.missed(state.live)
    barrier = any(one.plan.kind is Kind.BARRIER for one in missed)
    return barrier or len(missed) > max_skew or history.hides_missed(state.live)


def _left_behind(target: FleetVersion | None) -> Fence:
    decided = f"version {target.number}" if target is not None else "another version"
    return Fence(f"{decided} was decided; this host goes to it first")


def _refuse(state: MemberState, history: History) -> Step:
    number = history.unreadable_number
    if (number, ApplyPhase.PREPARED) in state.said:
        return Wait()
    return Say(number, ApplyPhase.PREPARED, MemberReport(ok=False, reason=history.unreadable))


def _take_part(state: MemberState, apply: Apply) -> Step:
    """Follow an apply that is not decided."""
    plan = apply.plan
    if state.alone:
        return Abort(plan.number, apply.step, "its coordinator is gone")
    if state.ill and (plan.number, ApplyPhase.PREPARED) not in state.said:
        return Say(plan.number, ApplyPhase.PREPARED, MemberReport(ok=False, reason=state.ill))
    if _goes_on(state, apply):
        return Resume()
    if plan.clears and plan.target.digest not in state.accepted:
        # If it is decided against, the host is made to reject it again.
        return Accept(plan.target.digest)
    wanted = Prepare(plan.target, plan.pause)
    # A barrier's members stand still also for what they serve already.
    needed = plan.target != state.live or plan.kind is Kind.BARRIER
    if needed and plan.target != state.failed and state.prepared != wanted:
        return wanted
    if (plan.number, ApplyPhase.PREPARED) not in state.said:
        return _say(state, apply, ApplyPhase.PREPARED)
    if plan.kind is Kind.BARRIER:
        return _stand_still(state, apply)
    if plan.wave_of(state.name) < apply.step:
        return _roll(state, apply)
    # Not yet what is to be live, even where it is what this host holds: it was left before.
    decided = state.live is not None and state.live == plan.previous
    if state.mode is not Mode.SERVING and decided and state.failed != state.live:
        return Resume()
    return Wait()


def _goes_on(state: MemberState, apply: Apply) -> bool:
    """Return whether a host that serves nothing serves what is decided until its turn comes.

    As one whose server was restarted: the others may take long to get ready.
    """
    plan = apply.plan
    if state.mode is not Mode.FENCED or state.prepared is not None or state.live is None:
        return False
    decided = plan.previous is None or state.live == plan.previous
    asked = apply.pause or (plan.number, ApplyPhase.READY) in state.said
    return (
        decided
        and not asked
        and plan.wave_of(state.name) >= apply.step
        and (state.failed != state.live)
    )


def _stand_still(state: MemberState, apply: Apply) -> Step:
    """Between the word to pause and the decision."""
    if not apply.pause:
        return Wait()
    if state.mode is Mode.SERVING and state.failed != apply.plan.target:
        return PauseHost(apply.plan.number)
    return _say(state, apply, ApplyPhase.READY)


def _roll(state: MemberState, apply: Apply) -> Step:
    """After the decision on the member's wave."""
    target = apply.plan.target
    if state.live == target and state.mode is not Mode.SERVING and state.failed != target:
        return Resume()
    if target in (state.live, state.failed):
        return _say(state, apply, ApplyPhase.DONE)
    return Commit(target)


def _settle(state: MemberState, history: History, max_skew: int) -> Step:
    """Go to what is decided."""
    target = history.target
    if target is not None and target.digest in history.accepts - state.accepted:
        return Accept(target.digest)
    ready = state.prepared is not None and state.prepared.target == target
    if state.mode is Mode.PAUSED and ready and target is not None:
        return Commit(target)
    if target is None or state.live == target:
        return _serve(state, history)
    if _is_behind(state, history, max_skew):
        return _left_behind(target)
    if state.failed == target:
        return Wait()
    if state.prepared is None or state.prepared.target != target:
        return Prepare(target)
    return Wait() if _runs_a_barrier(history) else Commit(target)


def _runs_a_barrier(history: History) -> bool:
    """Return whether a host that is not in it begins to serve nothing: it may just be left."""
    return history.running is not None and history.running.plan.kind is Kind.BARRIER


def _serve(state: MemberState, history: History) -> Step:
    """Be on the decided version, and let that be seen."""
    if state.mode is not Mode.SERVING and state.live is not None:
        waits = _runs_a_barrier(history) or state.failed == state.live
        return Wait() if waits else Resume()
    if state.mode is Mode.SERVING and state.prepared is not None:
        return Resume()  # which lets go of what is not to be
    if unknown := history.rejects - state.rejected:
        digest = min(unknown)
        return Reject(digest, history.rejection_reason(digest))
    newest = history.newest
    if newest is None or newest.outcome is not Verdict.COMMIT:
        return Wait()
    return _say(state, newest, ApplyPhase.DONE) if newest.plan.wave_of(state.name) else Wait()


def _say(state: MemberState, apply: Apply, phase: ApplyPhase) -> Step:
    """Report once."""
    if (apply.plan.number, phase) in state.said:
        return Wait()
    failed = state.failed == apply.plan.target
    report = MemberReport(ok=not failed, reason=state.why if failed else "")
    return Say(apply.plan.number, phase, report)
