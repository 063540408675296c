"""What a member does next, as a function of what it has read and what it is: no time, no effect."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Protocol

from weightsync.engine import PauseSpec
from weightsync_server.decide import (
    ApplyOrder,
    ApplyPhase,
    FleetVersion,
    ParticipantReport,
    Verdict,
)
from weightsync_server.fleet.fleet_history import Apply, History


class HostMode(enum.StrEnum):
    SERVING = "serving"
    #: Stands still in a barrier, and waits for the decision.
    PAUSED = "paused"
    #: Serves nothing: it has not asked yet what to serve, or must not serve what it has.
    FENCED = "fenced"


@dataclass(frozen=True)
class Prepare:
    target: FleetVersion
    pause: PauseSpec | None = None


@dataclass(frozen=True)
class MemberState:
    """What a member knows of itself.

    Attributes:
        unasked: Its process is new and has not stopped the host: engines that generate go on.
        prepared: What its host has ready, and how it would change over.
        failed: What its host could not prepare or commit; cleared after a while.
        why: Why that failed.
        said: Reports that are in the register.
        rejected: Digests that its host was made to reject.
        accepted: Digests that its host was made to accept again.
        followed: Number of the last apply by which that was done, as earlier processes know.
        undecided: It has stood still for longer than it may.
        stale: What it has read is too old to serve by.
        alone: The coordinator of the running apply is gone.
        displaced: Another process has its name, and is the one that others count.
        ill: Why it takes part in no apply, or empty.
    """

    name: str
    live: FleetVersion | None = None
    mode: HostMode = HostMode.SERVING
    unasked: bool = False
    prepared: Prepare | None = None
    failed: FleetVersion | None = None
    why: str = ""
    said: frozenset[tuple[int, ApplyPhase]] = frozenset()
    rejected: frozenset[str] = frozenset()
    accepted: frozenset[str] = frozenset()
    followed: int = 0
    undecided: bool = False
    stale: bool = False
    alone: bool = False
    displaced: bool = False
    ill: str = ""

    @property
    def may_serve(self) -> bool:
        return self.unasked or self.mode is HostMode.SERVING


@dataclass(frozen=True)
class Wait:
    """Nothing, until something changes."""


@dataclass(frozen=True)
class ReportPhase:
    number: int
    phase: ApplyPhase
    report: ParticipantReport
    nonce: str = ""


@dataclass(frozen=True)
class PauseHost:
    number: int


@dataclass(frozen=True)
class Commit:
    target: FleetVersion


@dataclass(frozen=True)
class Resume:
    """Serve what is live."""


@dataclass(frozen=True)
class Fence:
    reason: str


@dataclass(frozen=True)
class Reject:
    digest: str
    reason: str = ""


@dataclass(frozen=True)
class Accept:
    digest: str


@dataclass(frozen=True)
class Abort:
    number: int
    step: int
    reason: str
    nonce: str = ""


Step = Wait | Prepare | ReportPhase | PauseHost | Commit | Resume | Fence | Reject | Accept | Abort


def next_step(state: MemberState, history: History | None, max_skew: int = 1) -> Step:
    """Return what a member does next.

    It goes to what the fleet has decided, unless it takes part in an apply that is not; it serves
    an older version only where the limits let it. `history` None: never read yet.
    """
    if state.undecided and state.mode is HostMode.PAUSED:
        why = history.unreadable if history is not None else ""
        untold = "the decision on a barrier could not be read in time; the server keeps asking"
        return Fence(why or untold)
    if state.stale and state.may_serve:
        return Fence("the fleet's register was not read for longer than max_age_s; check it")
    if state.displaced and (state.unasked or state.mode is not HostMode.FENCED):
        return Fence(
            f"give each --fleet-member its own name: another server is member {state.name} now"
        )
    if history is None or state.stale or state.displaced:
        return Wait()
    if history.unreadable_commits and state.may_serve:
        number = history.unreadable_number
        return Fence(f"apply {number} was decided, but cannot be read: {history.unreadable}")
    if history.unreadable:
        behind = state.live is not None and _is_behind(state, history, max_skew)
        # Nor does anybody go back while this is so.
        left = state.may_serve and state.live is not None and state.live == history.left
        return Fence(history.unreadable) if behind or left else _refuse(state, history)
    apply = history.running
    if apply is not None and apply.plan.wave_of(state.name):
        # What was decided before it comes first, or else it is served until this one ends.
        behind = _is_behind_in(state, history, apply, max_skew)
        return _left_behind_in(apply) if behind else _take_part(state, history, apply)
    return _settle(state, history, max_skew)


def _is_behind(state: MemberState, history: History, max_skew: int) -> bool:
    """Return whether a host serves what it must not serve any more."""
    # What is decided may be of a commit that cannot be read, and so is missed by whoever serves it.
    # Engines that generate since before a start and do not tell what they hold are not judged.
    untold = state.unasked and state.live is None
    if not state.may_serve or untold or state.live == history.target:
        return False
    missed = history.missed(state.live)
    barrier = any(one.plan.order is ApplyOrder.BARRIER for one in missed)
    return barrier or len(missed) > max_skew or history.hides_missed(state.live)


def _is_behind_in(state: MemberState, history: History, apply: Apply, max_skew: int) -> bool:
    """Return the same of a member of a running apply."""
    if state.live in (None, apply.plan.previous):
        return False
    if apply.plan.order is ApplyOrder.BARRIER or _has_come(state, apply):
        return _is_behind(state, history, max_skew)
    # What its wave is to serve is not decided yet, also where this host has it already.
    known = replace(history, applies=history.applies[:-1])
    hidden = state.mode is HostMode.SERVING and history.hides_missed(state.live)
    return hidden or _is_behind(state, known, max_skew)


def _left_behind(target: FleetVersion | None, then: str = "applies it first") -> Fence:
    decided = f"version {target.number}" if target is not None else "another version"
    return Fence(f"{decided} was decided; this host {then}")


def _left_behind_in(apply: Apply) -> Fence:
    if apply.plan.order is ApplyOrder.ROLLING:
        return _left_behind(apply.plan.previous)
    then = "serves nothing until the running barrier is decided"
    return _left_behind(apply.plan.previous, then)


def _refuse(state: MemberState, history: History) -> Step:
    number = history.unreadable_number
    if (number, ApplyPhase.PREPARED) in state.said:
        return Wait()
    return ReportPhase(
        number, ApplyPhase.PREPARED, ParticipantReport(ok=False, reason=history.unreadable)
    )


def _has_come(state: MemberState, apply: Apply) -> bool:
    """Return whether what a member may make live in a running apply is decided."""
    return apply.plan.wave_of(state.name) < apply.step


def _take_part(state: MemberState, history: History, apply: Apply) -> Step:
    plan = apply.plan
    if state.alone:
        return Abort(plan.number, apply.step, "its coordinator has exited", plan.nonce)
    if state.ill and (plan.number, ApplyPhase.PREPARED) not in state.said:
        report = ParticipantReport(ok=False, reason=state.ill)
        return ReportPhase(plan.number, ApplyPhase.PREPARED, report, plan.nonce)
    if _goes_on(state, apply):
        return Resume()
    if (back := plan.previous) is not None and _is_to_go_back(state, history, apply):
        ready = state.prepared is not None and state.prepared.target == back
        return Commit(back) if ready else Prepare(back)
    accepted = plan.target.digest in state.accepted or plan.target == state.failed
    if plan.clears and not accepted:
        # If it is decided against, the host is made to reject it again.
        return Accept(plan.target.digest)
    wanted = Prepare(plan.target, plan.pause)
    # A barrier's members stand still also for what they serve already.
    needed = plan.target != state.live or plan.order is ApplyOrder.BARRIER
    if needed and plan.target != state.failed and state.prepared != wanted:
        return wanted
    if (plan.number, ApplyPhase.PREPARED) not in state.said:
        return _say(state, apply, ApplyPhase.PREPARED)
    if plan.order is ApplyOrder.BARRIER:
        return _stand_still(state, apply)
    if _has_come(state, apply):
        return _roll(state, apply)
    # Not yet what is to be live, even where it is what this host holds: it was left before.
    decided = state.live is not None and state.live == plan.previous
    if state.mode is not HostMode.SERVING and decided and state.failed != state.live:
        return Resume()
    return Wait()


def _goes_on(state: MemberState, apply: Apply) -> bool:
    """Return whether a host that stands still serves what is decided until its turn comes.

    It was restarted, or fenced, or stands still for an apply before this one.
    """
    plan = apply.plan
    if state.mode is HostMode.SERVING or state.live is None:
        return False
    decided = plan.previous is None or state.live == plan.previous
    asked = apply.pause or (plan.number, ApplyPhase.READY) in state.said
    return decided and not asked and not _has_come(state, apply) and (state.failed != state.live)


def _is_to_go_back(state: MemberState, history: History, apply: Apply) -> bool:
    """Return whether a host goes to what is decided before its wave of a rolling apply comes.

    It serves nothing, or what was decided against.
    """
    plan = apply.plan
    if plan.order is ApplyOrder.BARRIER or _has_come(state, apply):
        return False
    # After a failure of the one the other is tried once, and then what failed is told.
    if plan.previous == state.live or state.failed is not None:
        return False
    decided = {one.plan.target for one in history.commits}
    aborted = {one.plan.target for one in history.applies if one.outcome is Verdict.ABORT}
    left = state.live == plan.target or state.live in aborted - decided
    return left or state.mode is not HostMode.SERVING


def _stand_still(state: MemberState, apply: Apply) -> Step:
    if not apply.pause:
        return Wait()
    if state.mode is HostMode.SERVING and state.failed != apply.plan.target:
        return PauseHost(apply.plan.number)
    return _say(state, apply, ApplyPhase.READY)


def _roll(state: MemberState, apply: Apply) -> Step:
    target = apply.plan.target
    if state.live == target and state.mode is not HostMode.SERVING and state.failed != target:
        return Resume()
    if target in (state.live, state.failed):
        return _say(state, apply, ApplyPhase.DONE)
    return Commit(target)


def _settle(state: MemberState, history: History, max_skew: int) -> Step:
    target = history.target
    rejected = target is not None and target.digest in to_accept(state, history)
    if target is not None and rejected and target not in (state.live, state.failed):
        return Accept(target.digest)
    ready = state.prepared is not None and state.prepared.target == target
    if state.mode is HostMode.PAUSED and ready and target is not None:
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
    return history.running is not None and history.running.plan.order is ApplyOrder.BARRIER


def _serve(state: MemberState, history: History) -> Step:
    if state.mode is not HostMode.SERVING and state.live is not None:
        waits = _runs_a_barrier(history) or state.failed == state.live
        return Wait() if waits else Resume()
    if state.mode is HostMode.SERVING and state.prepared is not None:
        return Resume()  # which lets go of what is not to be
    newest = history.newest
    if newest is not None and newest.outcome is Verdict.COMMIT and newest.plan.wave_of(state.name):
        said = _say(state, newest, ApplyPhase.DONE)
        if not isinstance(said, Wait):
            return said
    return _mark(state, history)


def to_accept(state: MemberState, history: History) -> frozenset[str]:
    """Return what a host may have rejected for its fleet; what it rejects by itself stays so."""
    return history.accepts_since(state.followed) - state.accepted


def _mark(state: MemberState, history: History) -> Step:
    """Have the host know what is rejected and accepted; what it cannot keep waits a while."""
    unknown, again = history.rejects - state.rejected, to_accept(state, history)
    if state.failed is not None and state.failed.digest in unknown | again:
        return Wait()
    if unknown:
        digest = min(unknown)
        return Reject(digest, history.rejection_reason(digest))
    return Accept(min(again)) if again else Wait()


def _say(state: MemberState, apply: Apply, phase: ApplyPhase) -> Step:
    if (apply.plan.number, phase) in state.said:
        return Wait()
    failed = state.failed == apply.plan.target
    report = ParticipantReport(ok=not failed, reason=state.why if failed else "")
    return ReportPhase(apply.plan.number, phase, report, apply.plan.nonce)


class HostParticipant(Protocol):
    """One host. Calls come one at a time, but for `live`, and may be repeated at any time.

    A host that loses this process while it is paused or fenced serves nothing until it is asked
    again: a pause must never end by itself, also not by its lease. By itself a host serves only
    the version that `commit` or `resume` has let it serve last, so that an engine which comes back
    with another one waits.
    """

    async def prepare(self, target: FleetVersion, pause: PauseSpec | None = None) -> None:
        """Have a version staged and proved on every rank, while the live one is served.

        May be cancelled. `pause` None: no way to change over was chosen.
        """

    async def pause(self) -> None:
        """Stand still: from its return nothing is generated until `commit` or `resume`.

        The host may put what it has prepared in place and prove it before it returns, so that
        `commit` has only to let it be served; `resume` then puts the version before back first.

        Raises:
            WeightSyncError: It serves as before.
        """

    async def commit(self, target: FleetVersion) -> None:
        """Make a prepared version live, prove it and serve it; pauses by itself where needed.

        Raises:
            WeightSyncError: Nothing is served until the next `commit` or `resume`; `live` says
                what is in place.
        """

    async def resume(self) -> None:
        """Serve what is live, after a pause, a fence or a failed commit; drop what was prepared.

        Raises:
            WeightSyncError: Nothing is served.
        """

    async def fence(self, reason: str) -> None:
        """Serve nothing (503) until `commit` or `resume`; from any state.

        Raises:
            WeightSyncError: It may still serve; call again.
        """

    async def reject(self, digest: str, reason: str = "") -> None:
        """Never take a content again, unless an admin clears that."""

    async def accept(self, digest: str) -> None:
        """Take a content again that may have been rejected.

        Raises:
            WeightSyncError: It is rejected still; call again.
        """

    def live(self) -> FleetVersion | None:
        """Return the version that every rank is proved to hold, served or not; None: there is none.

        Between `pause` and the return of `commit` it is the one before. Its number is 0 where the
        fleet knows none of its content.
        """
