"""What a soak of 400 faults holds, if whatever is drawn is met."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.soak import points
from tests.soak.deck import ROWS, Card, deck
from weightsync import failpoints

_BLOWS = (
    "terminate", "kill_fetcher", "kill_ingest", "stop_fetcher", "engine_in_pause", "flip_stored",
    "flip_segment", "no_memory", "no_files", "tear_journal", "jump_clock", "second_server", "flood",
    "stall", "attack", "kill_server", "kill_twice", "stop_server", "kill_engine", "stop_engine",
    "late", "orphaned",
)  # fmt: skip


@pytest.mark.parametrize("vllm", [False, True])
def test_every_plan_can_be_followed(vllm: bool) -> None:
    rng = random.Random(1)
    cards = deck(points.placed(vllm=vllm), _BLOWS, rng, vllm=vllm).cards
    for card in cards:
        assert bool(card.blow) + bool(card.act) + bool(card.point) == 1
        if card.point:
            assert card.point in failpoints.parse(card.plan(rng))


def test_400_faults_hold_5_of_each_kind_and_100_deaths_at_failpoints() -> None:
    rng = random.Random(2)
    placed = points.placed(vllm=False)
    cards = deck(placed, _BLOWS, rng, vllm=False)
    rows: Counter[str] = Counter()
    deaths: Counter[str] = Counter()
    for _ in range(400):
        card = cards.draw(lambda _: True)
        cards.played(card, struck=True)
        rows[card.row] += 1
        deaths[card.point] += card.row == "1"
    assert rows.keys() >= ROWS.keys()
    assert min(rows[row] for row in ROWS) >= 5
    assert deaths.total() >= 100
    elsewhere = (points.in_fetcher, points.in_ingest, lambda p: p.startswith(points.IN_ENGINE))
    ours = {p for p in placed if not any(there(p) for there in elsewhere)}
    assert {point for point, count in deaths.items() if count} == ours


def test_what_must_not_be_played_now_comes_as_soon_as_it_may() -> None:
    rng = random.Random(3)
    cards = deck(points.placed(vllm=True), _BLOWS, rng, vllm=True)

    def harmless(card: Card) -> bool:
        return not card.kills_engine

    for _ in range(100):
        card = cards.draw(harmless)
        assert harmless(card)
        cards.played(card, struck=True)
    assert cards.draw(lambda _: True).kills_engine
