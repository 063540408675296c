"""Each count of a fleet's soak can be other than 0, and is 0 for what is right."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.soak.contents import MemoryContents
from tests.soak.fleet.decisions import DecisionWatch
from tests.soak.fleet.engine_watch import EngineWatch
from tests.soak.fleet.fleet_checks import Findings, Patience, judge
from tests.soak.fleet.fleet_deck import KINDS, deal, fleet_deck
from tests.soak.fleet.fleet_faults import FleetFaults
from tests.soak.fleet.fleet_record import FleetRecord, SeenApply, SeenDecision, Served
from tests.soak.fleet.fleet_site import MAX_AGE_S, MEMBERS, UNDECIDED_S
from tests.soak.fleet.fleet_soak import PATIENCE as SOAKED
from tests.soak.history import History
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.store.store_records import encode_document

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATIENCE = Patience(barrier_s=5.0, rolling_s=4.0)
FIRST, OLD, NEW = "first", "old", "new"


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    made = History(tmp_path / "history")
    yield made
    made.close()


def decided(verdict: str, at: float) -> SeenDecision:
    """A decision that was made in the half second before."""
    return SeenDecision(verdict, at - 0.5, at)


def barrier(number: int, target: str, at: float, *members: str) -> SeenApply:
    return SeenApply(number, "barrier", target, (members,), 1, (decided("COMMIT", at),))


def rolling(number: int, target: str, *decisions: SeenDecision) -> SeenApply:
    """First a, then b; the third decision judges b."""
    return SeenApply(number, "rolling", target, (("a",), ("b",)), 3, decisions)


def served(member: str, content: str, begun: float, ended: float) -> Served:
    return Served(member, content, begun, ended)


def found(*served: Served, applies: tuple[SeenApply, ...] = ()) -> Findings:
    record = FleetRecord(FIRST, {one.number: one for one in applies}, list(served))
    return judge(record, PATIENCE)


def counts(findings: Findings) -> tuple[int, int, int]:
    return (
        len(findings.undecided_served),
        len(findings.mixed_fleet_after_barrier),
        len(findings.violations),
    )


ONE = barrier(1, OLD, 10, "a", "b")
TWO = barrier(2, NEW, 20, "a")
ROLLED = rolling(2, NEW, *(decided("COMMIT", at) for at in (20, 21, 22)))
STOPPED = rolling(2, NEW, decided("COMMIT", 20), decided("ABORT", 22))


def test_what_is_decided_may_be_served_from_then_until_the_next() -> None:
    right = [
        served("a", FIRST, 0, 9),
        # In the time in which it was decided, nobody knows when.
        served("a", OLD, 9.6, 19.9),
        served("a", NEW, 19.6, 100),
        served("b", OLD, 9.6, 24.9),
    ]
    assert counts(found(*right, applies=(ONE, TWO))) == (0, 0, 0)


def test_a_rolling_apply_lets_its_waves_go_first_and_take_their_time() -> None:
    right = [
        served("a", OLD, 10, 25),
        served("a", NEW, 19.9, 100),
        served("b", OLD, 10, 25.9),
        served("b", NEW, 20.9, 100),
    ]
    assert counts(found(*right, applies=(ONE, ROLLED))) == (0, 0, 0)
    back = [served("a", NEW, 20, 24), served("a", OLD, 25, 100), served("b", OLD, 11, 100)]
    assert counts(found(*back, applies=(ONE, STOPPED))) == (0, 0, 0)


@pytest.mark.parametrize(
    ("wrong", "applies", "count"),
    [
        # A member of a barrier serves what was left.
        (served("a", OLD, 10, 20.1), (ONE, TWO), (0, 1, 0)),
        # It had stood still, and goes on with it.
        (served("a", OLD, 21, 22), (ONE, TWO), (0, 1, 0)),
        # It was no member, and has had its time.
        (served("b", OLD, 10, 25.1), (ONE, TWO), (1, 0, 0)),
        (served("b", OLD, 10, 26.1), (ONE, ROLLED), (1, 0, 0)),
        # Nobody had decided that yet.
        (served("a", NEW, 19.4, 30), (ONE, TWO), (0, 0, 1)),
        (served("b", NEW, 20.2, 30), (ONE, ROLLED), (0, 0, 1)),
        (served("b", NEW, 20.2, 30), (ONE, STOPPED), (0, 0, 1)),
        (served("a", "never", 20, 30), (ONE, TWO), (0, 0, 1)),
    ],
)
def test_what_is_wrong_is_counted(
    wrong: Served, applies: tuple[SeenApply, ...], count: tuple[int, int, int]
) -> None:
    assert counts(found(wrong, applies=applies)) == count


def test_one_answer_counts_only_where_it_was_wrong_all_the_time() -> None:
    def once(content: str, asked: float, answered: float) -> Findings:
        return found(served("a", content, answered, asked), applies=(ONE, TWO))

    assert counts(once(OLD, 19.9, 20.2)) == (0, 0, 0)
    assert counts(once(OLD, 20.1, 20.2)) == (0, 1, 0)
    assert counts(once(NEW, 19.4, 19.6)) == (0, 0, 0)
    assert counts(once(NEW, 19.3, 19.4)) == (0, 0, 1)


def test_going_back_to_what_was_live_before_is_right() -> None:
    back = barrier(3, OLD, 30, "a", "b")
    right = [served("a", OLD, 10, 19), served("a", NEW, 20, 29), served("a", OLD, 30, 100)]
    assert counts(found(*right, applies=(ONE, TWO, back))) == (0, 0, 0)
    # In between it was not.
    assert counts(found(served("a", OLD, 10, 100), applies=(ONE, TWO, back))) == (0, 1, 0)


def test_who_begins_what_a_barrier_has_left_is_found_however_short_that_was() -> None:
    def begun(since: float, at: float, *applies: SeenApply) -> list[str]:
        run = Served("b", OLD, at, at, since)
        record = FleetRecord(FIRST, {one.number: one for one in applies}, [run])
        return judge(record, Patience(5.0, 4.0, frozenset({"b"}))).begun

    # It was no member of the second barrier, and stood still meanwhile.
    assert len(begun(20.1, 20.2, ONE, TWO)) == 1
    # It may have begun before.
    assert not begun(19.9, 20.2, ONE, TWO)
    assert not begun(11.0, 11.1, ONE, TWO)
    assert not begun(30.6, 30.7, ONE, TWO, barrier(3, OLD, 30, "a", "b"))
    # It comes in the midst of the second one, which is committed without it.
    assert len(begun(15.0, 15.1, ONE, replace(TWO, planned=14.0))) == 1
    assert not begun(13.0, 13.1, ONE, replace(TWO, planned=14.0))
    # What it served before that it may go on with, where nothing else limits it.
    long = FleetRecord(FIRST, {1: ONE, 2: TWO}, [Served("b", OLD, 11, 100)])
    assert counts(judge(long, Patience(5.0, 4.0, frozenset({"b"})))) == (0, 0, 0)
    assert counts(judge(long, PATIENCE)) == (1, 0, 0)


def test_a_commit_that_is_gone_is_lost(history: History) -> None:
    for version in (2, 3):
        history.pushing(version, f"digest {version}")
        history.pushed(version, f"digest {version}")
    kept = pb.VersionInfo(version=2, content_digest="digest 2", durability=pb.DURABILITY_COMMITTED)
    history.check_versions([kept], "", restarted=True)
    assert history.lost == {3}


def test_an_engine_is_seen_as_it_goes_from_content_to_content(history: History) -> None:
    answers = [
        {"generating": True, "content": OLD},
        {"generating": True, "content": OLD},
        {"generating": False, "content": OLD},
        None,
        {"generating": True, "content": NEW},
        {"generating": True, "content": "old, new"},
    ]
    record = FleetRecord(FIRST)
    watch = EngineWatch("a", iter(answers).__next__, {OLD, NEW}, record, history)
    for _ in answers:
        watch.look()
    assert [one.content for one in record.served] == [OLD, NEW, "old, new"]
    first, second, third = (one.since for one in record.served)
    assert first < 0 < second < third
    assert watch.answers == 5
    (wrong,) = history.violations
    assert wrong.startswith("a serves what is no version: old, new")


def test_decisions_are_read_as_they_come(history: History) -> None:
    record = FleetRecord(FIRST)
    watch = DecisionWatch([], "f/", record, history)
    plan = {"number": 7, "nonce": "n", "kind": "rolling", "target": [2, NEW], "decisions": 3}
    keys = {
        "applies/000000000007/plan": encode_document(plan | {"rejects": ""}),
        "rosters/n/000000": encode_document({"continues": False, "waves": [["a"], ["b"]]}),
        "members/a": b"{}",
    }
    watch._take(keys, 5.0)
    assert record.applies[7].outcome == ""
    assert (record.applies[7].waves, record.applies[7].target) == ((("a",), ("b",)), NEW)
    watch._after = 4.0
    first = {"applies/000000000007/decisions/000001": encode_document({"verdict": "COMMIT"})}
    watch._take(keys | first, 6.0)
    (decision,) = record.applies[7].decisions
    assert (decision.after, decision.by) == (4.0, 6.0)
    second = {"applies/000000000007/decisions/000002": encode_document({"verdict": "ABORT"})}
    watch._take(keys | first | second, 7.0)
    assert record.applies[7].outcome == "ABORT"
    assert not history.violations
    changed = {"applies/000000000007/decisions/000001": encode_document({"verdict": "ABORT"})}
    watch._take(keys | changed | second, 8.0)
    assert len(history.violations) == 1


def test_the_deck_deals_as_many_of_each_kind_in_an_order_of_its_seed() -> None:
    def dealt(seed: int) -> list[tuple[str, str, float, str]]:
        rng = random.Random(seed)
        deck = fleet_deck(rng)
        strokes = [deal(deck, rng) for _ in range(10 * len(KINDS))]
        return [(one.card.name, one.victim, one.seconds, one.point) for one in strokes]

    first = dealt(1)
    assert first == dealt(1) != dealt(2)
    assert set(Counter(name for name, *_ in first).values()) == {10}
    for name, victim, _, point in first:
        assert callable(getattr(FleetFaults, name))
        assert victim in KINDS[name][1]
        assert bool(point) == name.endswith(("in_phase", "coordinator"))


def test_some_faults_outlast_every_limit_where_a_host_must_not_serve_on() -> None:
    # What is left, then a second and more until the others have decided, then what is forgiven.
    limit_s = 1 + max(UNDECIDED_S, MAX_AGE_S) + max(SOAKED.barrier_s, SOAKED.rolling_s)
    rng = random.Random(1)
    deck = fleet_deck(rng)
    strokes = [deal(deck, rng) for _ in range(20 * len(KINDS))]
    long = Counter(one.card.name for one in strokes if one.seconds > limit_s)
    cut = {name for name, (_, victims, _) in KINDS.items() if victims == MEMBERS} - {
        "kill_engine", "cut_origin", "halt_origin",
    }  # fmt: skip
    assert long.keys() <= cut
    # About one in six of them, so that the others decide meanwhile.
    assert 20 * len(cut) / 10 < long.total() < 20 * len(cut) / 4


def test_contents_of_an_engine_are_told_apart() -> None:
    contents = MemoryContents()
    assert len({contents.digest(number) for number in range(20)}) == 20
