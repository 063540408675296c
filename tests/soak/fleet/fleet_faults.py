"""How each fault of a fleet is done, from its beginning to the end of what it broke."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

import grpc

from tests.soak.callers import MODEL
from tests.support.object_proxy import Fault
from tests.support.proxy import Faults
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.soak.fleet.fleet_callers import Operator
    from tests.soak.fleet.fleet_deck import Stroke
    from tests.soak.fleet.fleet_site import FleetServer, FleetSite, Member
    from tests.support.proxy import FaultProxy

__all__ = ["FleetFaults"]

#: How long a fault waits until somebody comes by, seconds.
_PATIENCE_S = 30.0
_LOOK_S = 0.02
#: How long a member takes to come, and is alone with what it knows; seconds.
_JOINS_S, _ALONE_S = 8.0, 3.0
#: Until a barrier is decided, seconds; its answer comes later.
_BARRIER_S = 3.0
#: How often it comes while the others are decided on, and not while they get ready.
_AT_COMMIT = 0.7
#: By how much a wall clock is wrong, seconds.
_HOUR_S, _DECADE_S = 3600, 315360000
_CLOCKS = 0.3


class FleetFaults:
    """Each method commits a fault, holds it for as long as it lasts and heals it.

    Args:
        site: The processes.
        operator: Who asks for applies.
        over: The soak ends, and nobody comes by any more.
        barriers: Returns how many barriers without a member are committed.
    """

    def __init__(
        self,
        site: FleetSite,
        operator: Operator,
        over: threading.Event,
        barriers: Callable[[str], int],
    ) -> None:
        self._site, self._operator, self._over = site, operator, over
        self._barriers = barriers

    def commit(self, stroke: Stroke) -> bool:
        """Do it all; return whether it has struck."""
        name = stroke.card.blow
        act: Callable[[Stroke], bool | None] = getattr(self, name)
        return act(stroke) is not False

    # Servers

    def kill_member(self, stroke: Stroke) -> None:
        """Kill a server; in a part of the cases it comes back with a wrong wall clock."""
        member, wrapper = self._member(stroke), []
        if stroke.choice < _CLOCKS:
            choose = random.Random(stroke.choice)
            ahead = choose.choice((_HOUR_S, -_HOUR_S, _DECADE_S, -_DECADE_S))
            wrapper = [sys.executable, "-m", "tests.soak.clock", str(ahead)]
        self._kill(member, stroke.seconds, wrapper)

    def kill_trainers_server(self, stroke: Stroke) -> None:
        """Kill the origin."""
        self._kill(self._site.origin, stroke.seconds)

    def freeze_member(self, stroke: Stroke) -> None:
        """Stop a server for a while."""
        self._member(stroke).stop_for(stroke.seconds)

    def kill_member_in_phase(self, stroke: Stroke) -> bool:
        """Kill a member where it follows an apply."""
        return self._at_point(stroke, "panic", ask=False)

    def freeze_member_in_phase(self, stroke: Stroke) -> bool:
        """Stop a member where it follows an apply."""
        return self._at_point(stroke, "stop", ask=False)

    def freeze_past_lease_in_phase(self, stroke: Stroke) -> bool:
        """Stop a member before it commits, until the others have gone on without it.

        It finds etcd cut off, so that what it knows is all that it has.
        """
        member, others = self._member(stroke), self._others(stroke)
        self._operator.only_barriers, self._operator.asks = True, others[0].name
        try:
            if not self._met(member, f"{stroke.point}=1*stop"):
                return False
            time.sleep(stroke.seconds)
            gone_on = self._asked(others[0], self._barriers_without(stroke.victim))
            _cut(member.etcd_links, _ALONE_S, lambda: member.send(signal.SIGCONT))
            return gone_on
        finally:
            member.send(signal.SIGCONT)
            self._operator.only_barriers, self._operator.asks = False, ""

    def join_in_apply(self, stroke: Stroke) -> bool:
        """Have a member gone, and come back while a barrier gets ready or is being decided."""
        member, others = self._member(stroke), self._others(stroke)
        slow, point = others[1], "fleet.prepare"
        if stroke.choice < _AT_COMMIT:
            slow, point = others[0], "fleet.decide"
        member.kill()
        try:
            time.sleep(stroke.seconds)
            self._operator.only_barriers, self._operator.asks = True, others[0].name
            before = slow.hits()
            asking = threading.Thread(
                target=self._asked, args=(others[0], lambda: slow.hits() > before)
            )
            asking.start()
            met = self._met(slow, f"{point}=1*sleep({_JOINS_S:g})")
        finally:
            member.start()
            self._operator.only_barriers, self._operator.asks = False, ""
        asking.join()
        return met

    def kill_coordinator(self, stroke: Stroke) -> bool:
        """Kill the member that was asked for an apply, in its midst."""
        return self._at_point(stroke, "panic", ask=True)

    def freeze_coordinator(self, stroke: Stroke) -> bool:
        """Stop the member that was asked for an apply, in its midst."""
        return self._at_point(stroke, "stop", ask=True)

    def kill_engine(self, stroke: Stroke) -> None:
        """Kill an engine, which comes back with the checkpoint that it began with."""
        member = self._member(stroke)
        member.engine.stop()
        time.sleep(stroke.seconds / 2)
        member.engine.start()

    # etcd

    def kill_etcd(self, stroke: Stroke) -> None:
        """Kill any of etcd's members."""
        self._kill_nodes([int(stroke.choice * 3)], stroke.seconds)

    def kill_leader(self, stroke: Stroke) -> None:
        """Kill etcd's leader."""
        self._kill_nodes([self._site.etcd.leader()], stroke.seconds)

    def freeze_leader(self, stroke: Stroke) -> None:
        """Stop etcd's leader for a while."""
        leader = self._site.etcd.leader()
        self._site.etcd.signal(leader, signal.SIGSTOP)
        time.sleep(stroke.seconds)
        self._site.etcd.signal(leader, signal.SIGCONT)

    def lose_quorum(self, stroke: Stroke) -> None:
        """Kill two of etcd's members."""
        kept = int(stroke.choice * 3)
        self._kill_nodes([number for number in range(3) if number != kept], stroke.seconds)

    # Links

    def cut_etcd(self, stroke: Stroke) -> None:
        """Refuse a member's connections to etcd."""
        _cut(self._member(stroke).etcd_links, stroke.seconds)

    def halt_etcd(self, stroke: Stroke) -> None:
        """Let nothing pass between a member and etcd; what waits arrives afterwards."""
        _halt(self._member(stroke).etcd_links, stroke.seconds)

    def cut_origin(self, stroke: Stroke) -> None:
        """Refuse a member's connections to the store or the origin."""
        _cut([self._member(stroke).origin_link], stroke.seconds)

    def halt_origin(self, stroke: Stroke) -> None:
        """Let nothing pass between a member and the store or the origin."""
        _halt([self._member(stroke).origin_link], stroke.seconds)

    def cut_origins_store(self, stroke: Stroke) -> None:
        """Refuse the origin's connections to the store."""
        _cut([self._site.store_links[stroke.victim]], stroke.seconds)

    # The store. Its process keeps all in memory, so that what is killed are its connections.

    def cut_store(self, stroke: Stroke) -> None:
        """Refuse everybody's connections to the store."""
        _cut([self._site.store_link], stroke.seconds)

    def freeze_store(self, stroke: Stroke) -> None:
        """Stop the store for a while."""
        os.kill(self._site.store_pid, signal.SIGSTOP)
        time.sleep(stroke.seconds)
        os.kill(self._site.store_pid, signal.SIGCONT)

    def throttle_store(self, stroke: Stroke) -> None:
        """Let the store refuse most requests."""
        self._answer(stroke, lambda number: Fault.THROTTLE if number % 3 else Fault.NONE)

    def lose_replies(self, stroke: Stroke) -> None:
        """Let the store do requests and lose its answers."""
        self._answer(stroke, lambda number: Fault.NONE if number % 3 else Fault.LOSE_REPLY)

    # Inside

    def _member(self, stroke: Stroke) -> Member:
        return self._site.members[stroke.victim]

    def _others(self, stroke: Stroke) -> list[Member]:
        return [one for name, one in self._site.members.items() if name != stroke.victim]

    def _barriers_without(self, member: str) -> Callable[[], bool]:
        before = self._barriers(member)
        return lambda: self._barriers(member) > before

    def _asked(self, member: Member, condition: Callable[[], bool]) -> bool:
        """Ask a member for barriers until something has come, which is returned.

        The operator may be waiting for an answer still.
        """

        def ask() -> bool:
            committed, _ = self._operator.history.snapshot()
            request = pb.ApplyVersionRequest(
                model=MODEL,
                version=max(committed),
                scope=pb.SCOPE_FLEET,
                order=pb.ENGINE_ORDER_TOGETHER,
            )
            with contextlib.suppress(grpc.RpcError):
                member.server.stub.ApplyVersion(request, timeout=_BARRIER_S)
            return condition()

        return self._until_over(ask)

    def _until_over(self, condition: Callable[[], bool]) -> bool:
        """Return whether it has come in the time for which a fault waits."""
        end = time.monotonic() + _PATIENCE_S
        while not (found := condition()) and time.monotonic() < end and not self._over.is_set():
            time.sleep(_LOOK_S)
        return found

    def _met(self, member: Member, plan: str) -> bool:
        """Arm a member, and return whether it came by."""
        before = member.hits()
        member.arm(plan)
        self._until_over(lambda: member.hits() > before)
        member.arm("")
        # What was met in the last moment counts, too.
        time.sleep(_LOOK_S)
        return member.hits() > before

    def _kill(self, server: FleetServer, seconds: float, wrapper: Iterable[str] = ()) -> None:
        server.kill()
        time.sleep(seconds)
        server.start(list(wrapper))

    def _at_point(self, stroke: Stroke, action: str, *, ask: bool) -> bool:
        member = self._member(stroke)
        if ask:
            self._operator.asks = stroke.victim
        met = self._met(member, f"{stroke.point}=1*{action}")
        if ask:
            self._operator.asks = ""
        if not met:
            return False
        time.sleep(stroke.seconds)
        if action == "stop":
            member.send(signal.SIGCONT)
        else:
            member.server.kill()
            member.start()
        return True

    def _kill_nodes(self, numbers: list[int], seconds: float) -> None:
        etcd = self._site.etcd
        for number in numbers:
            etcd.signal(number, signal.SIGKILL)
        time.sleep(seconds)
        for number in numbers:
            etcd.start(number)
        for number in numbers:
            etcd.wait(number)

    def _answer(self, stroke: Stroke, fault: Callable[[int], Fault]) -> None:
        before = self._site.store.fault
        self._site.store.fault = lambda number, _method, _path: fault(number)
        time.sleep(stroke.seconds)
        self._site.store.fault = before


def _cut(
    links: Iterable[FaultProxy], seconds: float, then: Callable[[], None] = lambda: None
) -> None:
    chosen = list(links)
    for link in chosen:
        link.faults = Faults(refuse=True)
        link.cut()
    then()
    time.sleep(seconds)
    for link in chosen:
        link.faults = Faults()


def _halt(links: Iterable[FaultProxy], seconds: float) -> None:
    chosen = list(links)
    for link in chosen:
        link.faults = Faults(halt=True)
    time.sleep(seconds)
    for link in chosen:
        link.faults = Faults()
