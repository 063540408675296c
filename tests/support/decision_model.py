"""A coordinator and three members that die, wait too long and lose replies, in every order.

What runs is what members and coordinators run: both `next_step`s. Around them are a
register whose creates happen at once, or at any later time, or never, and hosts that serve what
they last resumed on. A member acts on what it read last, however long ago. Timers may run out at
any moment, since nothing may depend on when they do.

Asked of every state:

- with a barrier nobody serves the old version once COMMIT is there, and nobody has the new one
  before, or after an ABORT,
- COMMIT comes only when every member has said that it stands still, and each does,
- with waves nobody has the new version before the decision on its wave,
- if nothing else dies, it ends decided, and all that live serve what was decided; those that come
  back do so too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from weightsync_server.decide import (
    ApplyOrder,
    ApplyPhase,
    Decide,
    DecisionPlan,
    DecisionState,
    FleetVersion,
    OrderPause,
    ParticipantReport,
    Reports,
    Verdict,
    divide,
)
from weightsync_server.decide import next_step as next_order
from weightsync_server.fleet.fleet_history import Apply, History
from weightsync_server.fleet.member_steps import (
    Abort,
    Commit,
    Fence,
    HostMode,
    MemberState,
    PauseHost,
    Prepare,
    ReportPhase,
    Resume,
    next_step,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightsync_server.decide import Order
    from weightsync_server.fleet.member_steps import Step

__all__ = ["ANCIENT", "COMMIT", "NAMES", "NEW", "OLD", "Member", "Model", "World", "explore"]

ANCIENT, OLD, NEW = FleetVersion(0, "ancient"), FleetVersion(1, "old"), FleetVersion(2, "new")
COMMIT, ABORT = Verdict.COMMIT, Verdict.ABORT
_View = tuple[bool, bool, tuple[Verdict, ...]]
NAMES = ("a", "b", "c")


@dataclass(frozen=True)
class Member:
    """One member and its host.

    Attributes:
        state: What the member knows of itself; `said` is what the register has of it.
        refused: Phases that it has reported as not reached.
        view: Plan, pause and decisions as it read them last; None: never.
        alive: Its process runs.
        serving: Its host generates.
        stopped: Its journal says that it may not serve.
        announced: Others see it in the register.
    """

    state: MemberState
    refused: frozenset[ApplyPhase] = frozenset()
    view: _View | None = None
    alive: bool = True
    serving: bool = True
    stopped: bool = False
    announced: bool = True

    def said(self, phase: ApplyPhase) -> bool:
        return (1, phase) in self.state.said


@dataclass(frozen=True)
class World:
    """All that is.

    Attributes:
        planned: The plan is there.
        pause: Members may pause.
        decisions: What is decided.
        under_way: Creates of decisions that may be done later, or never.
        members: They.
        coordinator: One runs.
        budget: How many more may crash, come back, be lost, fail and be taken to be gone.
    """

    planned: bool
    pause: bool
    decisions: tuple[Verdict, ...]
    under_way: frozenset[tuple[int, Verdict]]
    members: tuple[Member, ...]
    coordinator: bool
    budget: tuple[int, int, int, int, int]

    @property
    def view(self) -> _View:
        return self.planned, self.pause, self.decisions

    def with_member(self, at: int, member: Member) -> World:
        return replace(self, members=(*self.members[:at], member, *self.members[at + 1 :]))

    def spend(self, which: int) -> World | None:
        if not self.budget[which]:
            return None
        left = [count - (at == which) for at, count in enumerate(self.budget)]
        return replace(self, budget=(left[0], left[1], left[2], left[3], left[4]))

    def decided(self, step: int, verdict: Verdict) -> World:
        """Create a decision, or find that there is one."""
        if step != len(self.decisions) + 1:
            return self
        return replace(self, decisions=(*self.decisions, verdict))


_CRASH, _RESTART, _LOSE, _FAIL, _GONE = range(5)


class Model:
    """The rules.

    Args:
        kind: Of the apply.
        names: Of its members.
        joins: What another holds that appears, which the coordinator had not seen when it made the
            plan; None: nobody does.
    """

    def __init__(
        self, kind: ApplyOrder, names: tuple[str, ...], *, joins: FleetVersion | None = None
    ) -> None:
        waves = divide(names, kind, 1)
        decisions = len(waves) + (kind is ApplyOrder.ROLLING)
        self.plan = DecisionPlan(1, "n", kind, NEW, OLD, waves, decisions)
        self.names, self.joins = names, joins
        self.step_of = lru_cache(None)(self._step_of)
        self.order_of = lru_cache(None)(self._order_of)

    def begin(self, budget: tuple[int, int, int, int, int]) -> World:
        members = tuple(Member(MemberState(name, OLD)) for name in self.names)
        if self.joins:
            new = MemberState("new", self.joins, HostMode.FENCED)
            members += (Member(new, serving=False, announced=False),)
        return World(
            not self.joins, False, (), frozenset(), members, coordinator=True, budget=budget
        )

    def _step_of(self, member: Member) -> Step:
        history = None
        if member.view is not None:
            planned, pause, decisions = member.view
            history = History((Apply(self.plan, pause, decisions),) if planned else ())
        return next_step(member.state, history)

    def _order_of(
        self, pause: bool, decisions: tuple[Verdict, ...], members: tuple[Member, ...], late: bool
    ) -> Order:
        reports = {
            phase: {
                one.state.name: ParticipantReport(phase not in one.refused)
                for one in members
                if one.said(phase)
            }
            for phase in ApplyPhase
        }
        apply = Apply(self.plan, pause, decisions)
        present = frozenset(one.state.name for one in members if one.announced)
        state = DecisionState(
            Reports(reports), present, step=apply.step, paused=apply.pause, late=late
        )
        return next_order(self.plan, state)

    def outcome(self, world: World) -> Verdict | None:
        return Apply(self.plan, world.pause, world.decisions).outcome

    # What may happen next.

    def successors(self, world: World) -> Iterator[World]:
        for step, verdict in world.under_way:
            yield replace(
                world.decided(step, verdict),
                under_way=world.under_way - {(step, verdict)},
            )
        if world.coordinator:
            yield from self._coordinate(world)
            if (dead := world.spend(_CRASH)) is not None:
                yield replace(dead, coordinator=False)
        elif (back := world.spend(_RESTART)) is not None:
            yield replace(back, coordinator=True)
        for at, member in enumerate(world.members):
            yield from self.live(world, at, member)

    def _coordinate(self, world: World) -> Iterator[World]:
        if not world.planned:
            yield replace(world, planned=True)
            return
        if self.outcome(world) is not None:
            return
        for late in (False, True):
            order = self.order_of(world.pause, world.decisions, world.members, late)
            if isinstance(order, Decide):
                yield from self._decide(world, order.step, order.verdict)
            elif isinstance(order, OrderPause):
                yield replace(world, pause=True)

    def _decide(self, world: World, step: int, verdict: Verdict) -> Iterator[World]:
        yield world.decided(step, verdict)
        if (lost := world.spend(_LOSE)) is not None:
            yield replace(lost, under_way=lost.under_way | {(step, verdict)})

    def live(self, world: World, at: int, member: Member) -> Iterator[World]:
        if not member.alive:
            if (back := world.spend(_RESTART)) is not None:
                yield back.with_member(at, self.restarted(member))
            return
        if not member.announced:
            yield world.with_member(at, replace(member, announced=True))
            return
        yield world.with_member(at, replace(member, view=world.view))
        yield from self.act(world, at, member)
        if member.state.mode is HostMode.PAUSED and not member.state.undecided:
            waited = replace(member.state, undecided=True)
            yield world.with_member(at, replace(member, state=waited))
        if not member.state.alone and (gone := world.spend(_GONE)) is not None:
            yield gone.with_member(at, replace(member, state=replace(member.state, alone=True)))
        if (dead := world.spend(_CRASH)) is not None:
            yield dead.with_member(at, replace(member, alive=False, view=None))

    def restarted(self, member: Member) -> Member:
        mode = HostMode.FENCED if member.stopped else HostMode.SERVING
        state = MemberState(member.state.name, member.state.live, mode, said=member.state.said)
        serving = member.serving and mode is HostMode.SERVING
        return replace(member, state=state, alive=True, view=None, serving=serving)

    def act(self, world: World, at: int, member: Member) -> Iterator[World]:
        step = self.step_of(member)
        state = member.state
        if isinstance(step, Abort):
            yield from self._decide(world, step.step, ABORT)
            return
        fallible = isinstance(step, (Prepare, Commit, PauseHost))
        if fallible and (bad := world.spend(_FAIL)) is not None:
            failed = replace(state, failed=NEW, why="it failed", prepared=None)
            if isinstance(step, Commit):
                failed = replace(failed, mode=HostMode.FENCED)
            broken = replace(
                member,
                state=failed,
                serving=member.serving and not isinstance(step, Commit),
                stopped=member.stopped or isinstance(step, Commit),
            )
            yield bad.with_member(at, broken)
        done = self._done(world, member, step)
        if done != member:
            yield world.with_member(at, done)

    def _done(self, world: World, member: Member, step: Step) -> Member:
        state = member.state
        match step:
            case Prepare():
                return replace(member, state=replace(state, prepared=step))
            case ReportPhase(_, phase, report):
                refused = member.refused if report.ok else member.refused | {phase}
                said = replace(state, said=state.said | {(1, phase)})
                return replace(member, state=said, refused=refused)
            case PauseHost():
                paused = replace(state, mode=HostMode.PAUSED, undecided=False)
                return replace(member, state=paused, serving=False, stopped=True)
            case Commit(target):
                self._check_commit(world, member, target)
                live = replace(
                    state, live=target, mode=HostMode.SERVING, prepared=None, failed=None
                )
                return replace(member, state=live, serving=True, stopped=False)
            case Resume():
                back = replace(state, mode=HostMode.SERVING, prepared=None, undecided=False)
                return replace(member, state=back, serving=True, stopped=False)
            case Fence():
                fenced = replace(state, mode=HostMode.FENCED, undecided=False)
                return replace(member, state=fenced, serving=False, stopped=True)
        return member

    # What must hold.

    def _check_commit(self, world: World, member: Member, target: FleetVersion) -> None:
        if target == NEW:
            wave = self.plan.wave_of(member.state.name)
            assert world.decisions[:wave] == (COMMIT,) * wave, "committed undecided"
        elif member.state.live == NEW:
            assert self.outcome(world) is ABORT, "went back undecided"

    def check(self, world: World) -> None:
        if self.plan.order is ApplyOrder.ROLLING:
            return
        if world.decisions == (COMMIT,):
            for one in world.members:
                assert not one.serving or one.state.live == NEW, "the old version is served"
        else:
            assert all(one.state.live != NEW for one in world.members), "committed undecided"

    def check_step(self, before: World, after: World) -> None:
        if self.plan.order is ApplyOrder.BARRIER and (before.decisions, after.decisions) == (
            (),
            (COMMIT,),
        ):
            for one in before.members:
                in_plan = one.state.name in self.plan.members
                assert one.said(ApplyPhase.READY) or not in_plan, (
                    f"{one.state.name} has not said ready"
                )
                assert not one.serving, f"{one.state.name} serves"
        assert after.decisions[: len(before.decisions)] == before.decisions, "decided twice"

    # How it ends.

    def finish(self, world: World, good: set[World], *, comes_back: bool) -> None:
        """Go on without faults, everybody in turn; see that it ends."""
        path = []
        if comes_back:
            members = tuple(one if one.alive else self.restarted(one) for one in world.members)
            world = replace(world, members=members, coordinator=True)
        world = replace(world, budget=(0, 0, 0, 0, 0), under_way=frozenset())
        while world not in good:
            path.append(world)
            after = self._round(world)
            if after == world:
                self._check_end(world)
                break
            assert len(path) < 200, "it does not end"
            world = after
        good.update(path)

    def _round(self, world: World) -> World:
        before = world
        for at in range(len(world.members)):
            member = world.members[at]
            if not member.alive:
                continue
            state = member.state
            if state.failed is not None and self.outcome(world) is not None:
                state = replace(state, failed=None)  # its time is over
            member = replace(member, view=world.view, state=state, announced=True)
            world = world.with_member(at, member)
            world = next(self.act(world, at, member), world)
        if world.coordinator and not world.planned:
            return replace(world, planned=True)
        for late in (False, True):
            if world.coordinator and self.outcome(world) is None and (not late or world == before):
                order = self.order_of(world.pause, world.decisions, world.members, late)
                if isinstance(order, Decide):
                    world = world.decided(order.step, order.verdict)
                elif isinstance(order, OrderPause):
                    world = replace(world, pause=True)
        if world == before and not world.coordinator and self.outcome(world) is None:
            members = tuple(
                replace(one, state=replace(one.state, alone=one.alive)) for one in world.members
            )
            world = replace(world, members=members)
        return world

    def _check_end(self, world: World) -> None:
        alive = [one for one in world.members if one.alive]
        if not alive and not world.coordinator:
            return
        outcome = self.outcome(world)
        assert outcome is not None, "it ends undecided"
        wanted = NEW if outcome is COMMIT else OLD
        for one in alive:
            assert one.serving, f"{one.state.name} does not serve in the end"
            assert one.state.live == wanted, f"{one.state.name} serves the other version"


def explore(model: Model, budget: tuple[int, int, int, int, int]) -> int:
    """Reach every state; return how many there are."""
    first = model.begin(budget)
    reached, pending = {first}, [first]
    good: tuple[set[World], set[World]] = (set(), set())
    while pending:
        world = pending.pop()
        model.check(world)
        for comes_back in (False, True):
            model.finish(world, good[comes_back], comes_back=comes_back)
        for after in model.successors(world):
            model.check_step(world, after)
            canonical = _canonical(model, after)
            if canonical not in reached:
                reached.add(canonical)
                pending.append(canonical)
    return len(reached)


def _canonical(model: Model, world: World) -> World:
    """Return one of the worlds that differ in the names of a barrier's members alone."""
    if model.plan.order is ApplyOrder.ROLLING:
        return world
    inside, outside = world.members[: len(model.names)], world.members[len(model.names) :]
    order = sorted(inside, key=lambda one: repr(replace(one, state=_nameless(one.state))))
    named = (
        replace(one, state=replace(one.state, name=name))
        for one, name in zip(order, model.names, strict=True)
    )
    return replace(world, members=(*named, *outside))


@lru_cache(None)
def _nameless(state: MemberState) -> MemberState:
    return replace(state, name="")
