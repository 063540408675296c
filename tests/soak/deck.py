"""The cards of a soak: each is one kind of fault, and the one that was met least comes first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.soak import points

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection, Sequence

__all__ = ["ROWS", "Card", "Deck", "deck"]

#: The kinds of faults, as the table of faults that the tests follow numbers them.
ROWS = {
    "1": "the server dies at a failpoint",
    "4": "the server is asked to end while it works",
    "6": "a fetcher dies",
    "7": "an ingest process dies",
    "8": "a fetcher stands still",
    "9": "a rank dies before, in or after its commit",
    "10": "a rank hangs",
    "11": "a rank lies",
    "12": "a rank answers too late",
    "13": "a pause fails, or its answer is lost",
    "14": "a resume fails, or its answer is lost",
    "15": "the engine is replaced in an apply",
    "17": "a trainer dies half-way",
    "18": "a trainer freezes half-way",
    "19": "the link is cut",
    "21": "the answer to a commit is lost",
    "22": "chunks come twice, overlap, leave a gap or come in the wrong order",
    "23": "a bit flips: in a chunk, in the store, in shared memory",
    "24": "two trainers push one version",
    "25": "an old trainer wakes up",
    "28": "an apply and a rollback at once",
    "29": "a version of which nothing came is applied",
    "30": "no memory for segments",
    "33": "no room for files",
    "36": "the journal is torn",
    "41": "a slow reader",
    "43": "the wall clock jumps",
    "44": "a second server on the same state",
    "45": "a flood of pushes",
    "46": "streams that stall",
    "50": "an attack",
    "51": "an attached trainer writes late",
    "52": "the server dies while an attached trainer writes",
}

#: Blows and acts, by row and how often each comes where a failpoint comes once.
_BLOWS = {
    "terminate": "4", "kill_fetcher": "6", "kill_ingest": "7", "stop_fetcher": "8",
    "engine_in_pause": "15", "flip_stored": "23", "flip_segment": "23", "no_memory": "30",
    "no_files": "33", "tear_journal": "36", "jump_clock": "43", "second_server": "44",
    "flood": "45", "stall": "46", "attack": "50",
    "late": "51", "orphaned": "52",
}  # fmt: skip
_ACTS = {
    "killed": "17", "frozen": "18", "cut": "19", "unheard": "21", "muddle": "22", "flip": "23",
    "race": "24", "stale": "25", "clash": "28", "incomplete": "29", "crawl": "41",
}  # fmt: skip
_WITH_ENGINE = (
    "engine_in_pause", "flip_segment", "no_memory", "tear_journal", "kill_engine", "stop_engine",
    "clash", "late", "orphaned",
)  # fmt: skip
#: Blows of no row of their own.
_MORE = ("kill_server", "kill_twice", "stop_server", "kill_engine", "stop_engine")
#: Failpoints that are a row of their own: plan, point, row.
_ROWED = (
    ("worker.prepare=1*panic", "worker.prepare", "9"),
    ("worker.commit=1*panic", "worker.commit", "9"),
    ("worker.half=1*panic", "worker.half", "9"),
    ("worker.written=1*panic", "worker.written", "9"),
    ("worker.half=1*stop", "worker.half", "10"),
    ("worker.commit=1*sleep(3.2)", "worker.commit", "10"),
    ("worker.reply=1*lie(content_digest)", "worker.reply", "11"),
    ("worker.reply=1*lie(apply_id)", "worker.reply", "11"),
    ("worker.written=1*sleep(3.2)", "worker.written", "12"),
    ("bridge.pause=1*error", "bridge.pause", "13"),
    ("bridge.paused=1*error", "bridge.paused", "13"),
    ("bridge.paused=1*sleep(1.5)", "bridge.paused", "13"),
    ("bridge.resume=2*error", "bridge.resume", "14"),
    ("bridge.resumed=1*error", "bridge.resumed", "14"),
)
_ERRORS = ("EIO", "ENOSPC", "EMFILE", "ENOMEM")
#: How much more often than an error at one failpoint: a row, and the death of the server at one.
_ROW, _DEATH = 4.6, 1.9


@dataclass(eq=False)
class Card:
    """One kind of fault.

    Attributes:
        name: How it is counted.
        row: Its row of `ROWS`; empty: none.
        weight: How often it comes where another comes once.
        blow: Name of what is done from outside.
        act: Name of what a caller does.
        point: Failpoint.
        action: What happens there, or a whole plan.
        kills_engine: A real vLLM must be started again.
        struck: How often it was met, and a half for each time that it was not.
        missed: How often it was not.
    """

    name: str
    row: str = ""
    weight: float = 1.0
    blow: str = ""
    act: str = ""
    point: str = ""
    action: str = ""
    kills_engine: bool = False
    struck: float = 0.0
    missed: int = 0

    @property
    def needs_engine(self) -> bool:
        """Whether it cannot be met while there is no engine."""
        if self.point:
            return points.needs_engine(self.point)
        return self.blow in _WITH_ENGINE or self.act in _WITH_ENGINE

    def plan(self, rng: random.Random) -> str:
        """Return the plan of failpoints; another one each time."""
        if "=" in self.action:
            return self.action
        starting = self.point.startswith((*points.STARTING, *points.SURVIVING))
        skip = 0 if starting or self.point in points.COMPANIONS else rng.choice((0, 0, 0, 1, 2))
        argument = {
            "sleep": f"({rng.uniform(0.1, 1.0):.2f})",
            "error": f"({rng.choice(_ERRORS)})",
        }.get(self.action, "")
        term = f"{self.point}={skip}>1*{self.action}{argument}"
        companion = points.COMPANIONS.get(self.point)
        return f"{companion};{term}" if companion else term


class Deck:
    """Draws the card that is furthest behind its weight.

    Args:
        cards: All of them.
        rng: Chooses among equals.
    """

    def __init__(self, cards: Sequence[Card], rng: random.Random) -> None:
        self.cards = list(cards)
        self._rng = rng
        for card in self.cards:
            # So that those of one kind do not follow one another.
            card.struck = rng.uniform(0, 0.9)

    def draw(self, may: Callable[[Card], bool]) -> Card:
        """Return a card that may be played."""
        return min(
            (card for card in self.cards if may(card)), key=lambda card: card.struck / card.weight
        )

    def played(self, card: Card, *, struck: bool) -> None:
        """Take note that a card was played; one that was not met comes again somewhat sooner."""
        card.struck += 1.0 if struck else 0.5
        card.missed += not struck


def _at_points(placed: Collection[str], rng: random.Random) -> list[Card]:
    cards = []
    for point in placed:
        fetcher, engine = points.in_fetcher(point), point.startswith(points.IN_ENGINE)
        ingest = points.in_ingest(point)
        row = "6" if fetcher else "7" if ingest else "9" if engine else "1"
        # What is dear is spent on ranks.
        weight = 0.2 if point.startswith("bridge.") else _DEATH if row == "1" else 0.5
        cards.append(
            Card(f"{point} panic", row, weight, point=point, action="panic", kills_engine=engine)
        )
        cards.append(Card(f"{point} error", weight=0.5, point=point, action="error"))
        starting = point.startswith((*points.STARTING, *points.SURVIVING))
        slow = "sleep" if starting else rng.choice(("sleep", "stop"))
        cards.append(Card(f"{point} {slow}", weight=0.2, point=point, action=slow))
    return cards


def deck(
    placed: Collection[str], blows: Collection[str], rng: random.Random, *, vllm: bool
) -> Deck:
    """Return all cards of a soak.

    Args:
        placed: Failpoints that can be met.
        blows: Those that there are.
        rng: Of all choices.
        vllm: The engine is a real vLLM.
    """
    cards = _at_points(placed, rng)
    for plan, point, row in _ROWED:
        # Those of one row share its weight.
        share = _ROW / sum(other == row for _, _, other in _ROWED)
        dies = "panic" in plan
        cards.append(Card(plan, row, share, point=point, action=plan, kills_engine=dies))
    for blow, row in _BLOWS.items():
        if blow in blows:
            weight = _ROW / 3 if row == "23" else _ROW
            kills = blow == "engine_in_pause"
            cards.append(Card(blow.replace("_", " "), row, weight, blow=blow, kills_engine=kills))
    for act, row in _ACTS.items():
        weight = _ROW / 3 if row == "23" else _ROW
        cards.append(Card(f"{act} (trainer or controller)", row, weight, act=act))
    for blow in _MORE:
        kills = blow == "kill_engine"
        cards.append(Card(blow.replace("_", " "), weight=1.5, blow=blow, kills_engine=kills))
    if vllm:
        lies = ("twice", "lost", "stale")
        cards += [
            Card(
                f"bridge.replies lie({lie})",
                "11",
                point="bridge.replies",
                action=f"bridge.replies=1*lie({lie})",
            )
            for lie in lies
        ]
    return Deck(cards, rng)
