"""How each fault of a fleet is done, from its beginning to the end of what it broke."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from typing import TYPE_CHECKING

from tests.support.object_proxy import Fault
from tests.support.proxy import Faults

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable

    from tests.soak.fleet.fleet_callers import Operator
    from tests.soak.fleet.fleet_deck import Stroke
    from tests.soak.fleet.fleet_site import FleetServer, FleetSite, Member
    from tests.support.proxy import FaultProxy

__all__ = ["FleetFaults"]

#: How long a fault waits until somebody comes by, seconds.
_PATIENCE_S = 20.0
_LOOK_S = 0.02
#: By how much a wall clock is wrong, seconds.
_HOUR_S, _DECADE_S = 3600, 315360000
_CLOCKS = 0.3


class FleetFaults:
    """Each method commits a fault, holds it for as long as it lasts and heals it.

    Args:
        site: The processes.
        operator: Who asks for applies.
        over: The soak ends, and nobody comes by any more.
    """

    def __init__(self, site: FleetSite, operator: Operator, over: threading.Event) -> None:
        self._site, self._operator, self._over = site, operator, over

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

    def _kill(self, server: FleetServer, seconds: float, wrapper: Iterable[str] = ()) -> None:
        server.kill()
        time.sleep(seconds)
        server.start(list(wrapper))

    def _at_point(self, stroke: Stroke, action: str, *, ask: bool) -> bool:
        member = self._member(stroke)
        before, end = member.hits(), time.monotonic() + _PATIENCE_S
        member.arm(f"{stroke.point}=1*{action}")
        if ask:
            self._operator.asks = stroke.victim
        while member.hits() == before and time.monotonic() < end and not self._over.is_set():
            time.sleep(_LOOK_S)
        member.arm("")
        if ask:
            self._operator.asks = ""
        # What was met in the last moment counts, too.
        time.sleep(_LOOK_S)
        if member.hits() == before:
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


def _cut(links: Iterable[FaultProxy], seconds: float) -> None:
    chosen = list(links)
    for link in chosen:
        link.faults = Faults(refuse=True)
        link.cut()
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
