"""The cards of a soak of a fleet: what each fault is, whom it strikes, and for how long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.soak.deck import Card, Deck
from tests.soak.fleet.fleet_site import MEMBERS, ORIGIN, UNLIMITED

if TYPE_CHECKING:
    import random

__all__ = ["KINDS", "Stroke", "deal", "fleet_deck", "missed"]

#: What is done, by name: what that is, whom it may strike, and what of each it takes for itself.
KINDS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "kill_member": ("a member's server dies", MEMBERS, "server"),
    "freeze_member": ("a member's server freezes", MEMBERS, "server"),
    "kill_member_in_phase": ("a member's server dies in a phase", MEMBERS, "server"),
    "freeze_member_in_phase": ("a member's server freezes in a phase", MEMBERS, "server"),
    "freeze_past_lease_in_phase": (
        "a member freezes until the others have gone on, and finds etcd cut off", (UNLIMITED,),
        "server",
    ),
    "join_in_apply": ("a member comes back in a barrier", (UNLIMITED,), "server"),
    "kill_coordinator": ("a coordinator dies in an apply", MEMBERS, "server"),
    "freeze_coordinator": ("a coordinator freezes in an apply", MEMBERS, "server"),
    "kill_engine": ("a member's engine dies", MEMBERS, "engine"),
    "kill_etcd": ("a member of etcd dies", ("etcd",), "nodes"),
    "kill_leader": ("etcd's leader dies", ("etcd",), "nodes"),
    "freeze_leader": ("etcd's leader freezes", ("etcd",), "nodes"),
    "lose_quorum": ("etcd loses its quorum", ("etcd",), "nodes"),
    "cut_etcd": ("a member's links to etcd are cut", MEMBERS, "etcd link"),
    "halt_etcd": ("a member's links to etcd carry nothing", MEMBERS, "etcd link"),
    "cut_origin": ("a member's link to what it follows is cut", MEMBERS, "origin link"),
    "halt_origin": ("a member's link to what it follows carries nothing", MEMBERS, "origin link"),
    "cut_store": ("the store is gone, with all connections to it", ("store",), "links"),
    "freeze_store": ("the store freezes", ("store",), "process"),
    "throttle_store": ("the store answers 503 to two of three requests", ("store",), "answers"),
    "lose_replies": ("the store loses every third answer", ("store",), "answers"),
    "kill_trainers_server": ("the origin dies", (ORIGIN,), "server"),
    "cut_origins_store": ("the origin's link to the store is cut", (ORIGIN,), "store link"),
}  # fmt: skip
#: How long a fault lasts, seconds: short ones that are ridden out, and some beyond one limit.
_SHORT_S, _LONG_S = (0.3, 2.5), (3.0, 9.0)
_LONG = 0.4
#: And some so long that the others decide meanwhile, and that whoever served on without their
#: decision would do so beyond every limit and what is added for a busy machine.
_BEYOND_S = (12.0, 16.0)
_BEYOND = 1 / 6
#: Between a host and the fleet's decisions; a fault of anything else outlasts no limit of these.
_DECIDES = ("server", "etcd link")
#: Beyond the lease of a member.
_PAST_LEASE_S = (3.0, 5.0)
#: What a fault takes of other members.
_MORE = {
    "freeze_past_lease_in_phase": tuple(f"{one} etcd link" for one in MEMBERS),
    "join_in_apply": tuple(f"{one} server" for one in MEMBERS),
}
#: Where a member is struck in an apply, and a coordinator.
_PHASES = ("fleet.prepare", "fleet.pause", "fleet.paused", "fleet.commit", "fleet.committed")
_STEPS = (
    "fleet.planned", "fleet.coordinate", "fleet.decide", "fleet.decided", "fleet.coordinated",
)  # fmt: skip


class Stroke:
    """One fault, chosen in full before it begins.

    Args:
        card: Its kind.
        rng: Of all choices.

    Attributes:
        card: As given.
        victim: Whom it strikes.
        seconds: For how long.
        point: The failpoint at which it strikes; empty: none.
        choice: A number from 0 to 1 for what else there is to choose.
    """

    def __init__(self, card: Card, rng: random.Random) -> None:
        self.card = card
        _, victims, self._what = KINDS[card.blow]
        self.victim = rng.choice(victims)
        self.seconds = rng.uniform(*self._range(rng.random()))
        points = {"in_phase": _PHASES, "coordinator": _STEPS}
        found = next((p for end, p in points.items() if card.blow.endswith(end)), ("",))
        if card.blow == "freeze_past_lease_in_phase":
            found = ("fleet.commit",)
        self.point = rng.choice(found)
        self.choice = rng.random()

    def _range(self, chance: float) -> tuple[float, float]:
        if self.card.blow in _MORE:
            return _PAST_LEASE_S
        if chance < _BEYOND and self._what in _DECIDES and self.victim != ORIGIN:
            return _BEYOND_S
        return _LONG_S if chance < _LONG else _SHORT_S

    @property
    def takes(self) -> frozenset[str]:
        """What no other fault may be at meanwhile."""
        asks = {"the operator"} if self.card.blow.endswith("coordinator") else set()
        more = _MORE.get(self.card.blow, ())
        if more:
            asks.add("the operator")
        return frozenset({f"{self.victim} {self._what}", *more} | asks)


def fleet_deck(rng: random.Random) -> Deck:
    """Return all cards, one of each kind: as often as one another."""
    return Deck([Card(name, row=name, blow=name) for name in KINDS], rng)


def deal(deck: Deck, rng: random.Random) -> Stroke:
    """Draw the next fault; it counts as met until `missed` says otherwise."""
    card = deck.draw(lambda _: True)
    deck.played(card, struck=True)
    return Stroke(card, rng)


def missed(card: Card) -> None:
    """Let a kind come again soon: nobody came by where it waited."""
    card.struck -= 0.5
    card.missed += 1
