"""What is of another plan, of nobody's, or was read too early, decides nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.support.fleet_folder import at_commit, path_of, put_back, put_back_past_a_commit, records
from tests.support.fleet_hosts import version
from tests.support.fleet_tasks import LIMITS, until
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.coordination.folder_keys import FolderKeys
from weightsync_server.decide import ApplyOrder, ApplyPhase, ParticipantReport, Verdict
from weightsync_server.fleet.coordinator import Coordinator
from weightsync_server.fleet.fleet_history import HistoryReader, Seen
from weightsync_server.fleet.fleet_records import (
    decision_key,
    decode_verdict,
    encode_pause,
    encode_report,
    encode_verdict,
    is_pause_of,
    pause_key,
    plan_key,
    report_key,
    reports_prefix,
    roster_prefix,
)
from weightsync_server.fleet.member_journal import MemberJournal
from weightsync_server.fleet.member_steps import HostMode
from weightsync_server.store.store_records import decode_document, encode_document

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.fleet_tasks import Fleet
    from weightsync_server.fleet.fleet_member import FleetMember

pytestmark = pytest.mark.timeout(60)


async def test_a_plan_that_follows_none_is_none_of_a_fleet(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await fleet.start("a", "b")
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)

    async def stray() -> None:
        for number in (30, 999_999_999_999):
            await fleet.register.create(plan_key(number), b"junk")
        await until(lambda: plan_key(30) in caplog.text)

    at_commit(monkeypatch, stray)
    outcome = await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER)
    assert (outcome.number, outcome.verdict, outcome.lagging) == (2, Verdict.COMMIT, ())
    outcome = await fleet.coordinator().apply(version(4), ApplyOrder.ROLLING)
    assert (outcome.number, outcome.verdict) == (3, Verdict.COMMIT)
    assert fleet.serving == {"a": 4, "b": 4}


@pytest.mark.parametrize("order", ApplyOrder)
async def test_a_stray_plan_counts_for_nothing_also_once_it_would_follow_one(
    fleet: Fleet, order: ApplyOrder
) -> None:
    await fleet.start("a", "b")
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    readable = decode_document(path_of(fleet, plan_key(1)).read_bytes()) | {"number": 4}
    await fleet.register.create(plan_key(4), encode_document(readable))
    for number in (3, 6):
        await fleet.register.create(plan_key(number), b"junk")
    outcome = await fleet.coordinator().apply(version(3), order)
    assert (outcome.number, outcome.verdict, outcome.reason) == (7, Verdict.COMMIT, "")
    assert fleet.serving == {"a": 3, "b": 3}
    # Each is decided against, and so is what would have come before.
    decided = {key: await fleet.register.get(decision_key(key, 1)) for key in range(2, 7)}
    assert {decode_verdict(value or b"")[0] for value in decided.values()} == {Verdict.ABORT}
    # Whoever reads it anew finds the same.
    assert (await fleet.coordinator().rollback(order)).target == version(2)


async def test_nobody_plans_beyond_a_stray_plan_what_is_decided_before_it(fleet: Fleet) -> None:
    await fleet.start("a", "b")
    coordinator = fleet.coordinator()
    await coordinator.apply(version(2), ApplyOrder.BARRIER)
    await fleet.register.create(plan_key(3), b"junk")
    # Another one has planned and committed in this moment.
    await fleet.register.create(decision_key(2, 1), encode_verdict(Verdict.COMMIT, "x"))
    with pytest.raises(WeightSyncError, match="apply 2 of the fleet runs"):
        await coordinator.apply(version(3), ApplyOrder.BARRIER)
    assert await fleet.register.get(plan_key(4)) is None


async def test_a_plan_that_nobody_can_read_hides_no_decision(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.start("a", "b")
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)

    async def unread() -> None:
        await fleet.register.create(plan_key(3), b"junk")
        await until(lambda: all(one.view.history.unreadable for one in fleet.members.values()))  # type: ignore[union-attr]  # they have started

    at_commit(monkeypatch, unread)
    limits = replace(LIMITS, settle_s=0.2)
    outcome = await fleet.coordinator(limits).apply(version(3), ApplyOrder.BARRIER)
    assert (outcome.verdict, outcome.lagging) == (Verdict.COMMIT, ("a", "b"))
    # They stood still for it, and are fenced when that is over.
    await until(lambda: all(plan_key(3) in one.why for one in fleet.members.values()))
    assert fleet.serving == {"a": 0, "b": 0}
    ended = await fleet.coordinator().abort()
    assert ended is not None
    assert (ended.number, ended.verdict) == (3, Verdict.ABORT)
    await fleet.until_serving(a=3, b=3)


@pytest.mark.parametrize("order", ApplyOrder)
async def test_nobody_to_wait_for_is_not_all(fleet: Fleet, order: ApplyOrder) -> None:
    await fleet.start("a", "b")
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    applying, gate = await fleet.begin(3, order, "a")
    await fleet.register.create(plan_key(3), b"junk")
    await until(lambda: all(one.view.history.unreadable for one in fleet.members.values()))  # type: ignore[union-attr]  # they have started
    # Longer than the coordinator waits between two looks.
    await asyncio.sleep(4 * LIMITS.poll_s)
    assert await fleet.register.get(decision_key(2, 1)) is None
    assert (await fleet.coordinator().abort()).number == 3  # type: ignore[union-attr]  # it is what runs
    gate.set()
    assert (await applying).verdict is Verdict.COMMIT
    await fleet.until_serving(a=3, b=3)


async def test_a_roster_that_is_gone_is_nobody_s_commit_and_counts_when_it_is_back(
    fleet: Fleet,
) -> None:
    await fleet.start("a")
    applying, gate = await fleet.begin(2, ApplyOrder.ROLLING, "a")
    running = fleet.members["a"].view.history.running  # type: ignore[union-attr]  # it has started
    assert running is not None
    key = f"{roster_prefix(running.plan.nonce)}000000"
    value = path_of(fleet, key).read_bytes()
    path_of(fleet, key).unlink()
    reader = HistoryReader(fleet.register)
    assert key.rpartition("/")[0] in (await reader.read()).unreadable
    with pytest.raises(WeightSyncError, match=r"restore rosters/") as caught:
        await fleet.coordinator().drive(1)
    assert caught.value.reason is Reason.DATA_CORRUPT
    path_of(fleet, key).write_bytes(value)
    assert (await reader.read()).running == running
    gate.set()
    assert (await applying).verdict is Verdict.COMMIT


async def test_who_takes_part_is_lost_of_an_apply_that_is_not_the_newest(fleet: Fleet) -> None:
    await fleet.start("a")
    applying, _ = await fleet.begin(2, ApplyOrder.ROLLING, "a")
    running = fleet.members["a"].view.history.running  # type: ignore[union-attr]  # it has started
    assert running is not None
    applying.cancel()
    path_of(fleet, f"{roster_prefix(running.plan.nonce)}000000").unlink()
    await fleet.register.create(plan_key(2), b"junk")
    with pytest.raises(WeightSyncError, match=r"down to 1, the newest one first") as caught:
        await fleet.coordinator().drive(1)
    assert roster_prefix(running.plan.nonce) in caught.value.message
    # What the sentence says ends both.
    ended = [await fleet.coordinator().abort() for _ in range(2)]
    assert [(one.number, one.verdict) for one in ended if one] == [
        (2, Verdict.ABORT),
        (1, Verdict.ABORT),
    ]


async def test_the_plan_of_another_number_is_damaged(fleet: Fleet) -> None:
    await fleet.start("a")
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    await fleet.register.create(plan_key(2), path_of(fleet, plan_key(1)).read_bytes())
    await until(lambda: fleet.members["a"].view.history.unreadable)  # type: ignore[union-attr]  # it has started
    assert "it is the plan of apply 1" in fleet.members["a"].view.history.unreadable  # type: ignore[union-attr]  # it has started
    assert (await fleet.coordinator().abort()).verdict is Verdict.ABORT  # type: ignore[union-attr]  # it runs
    outcome = await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER)
    assert (outcome.number, outcome.verdict) == (3, Verdict.COMMIT)


async def test_a_decision_on_another_plan_is_none_on_this_one(fleet: Fleet) -> None:
    await fleet.start("a", "b")
    left = encode_verdict(Verdict.COMMIT, "x", nonce="another")
    await fleet.register.create(decision_key(1, 1), left)
    fleet.hosts["b"].refuses = {"prepare"}
    outcome = await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER)
    assert (outcome.verdict, fleet.serving) == (Verdict.ABORT, {"a": 1, "b": 1})
    assert "another plan with this number" in outcome.reason
    fleet.hosts["b"].refuses = set()
    assert (await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER)).number == 2
    assert fleet.serving == {"a": 3, "b": 3}


async def test_what_was_said_of_another_plan_is_not_said_of_this_one(fleet: Fleet) -> None:
    await fleet.start("a", "b")
    left = encode_report(ParticipantReport(ok=True), "another")
    for name in "ab":
        await fleet.register.create(report_key(1, ApplyPhase.READY, name), left)
    outcome = await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER)
    assert (outcome.verdict, fleet.serving) == (Verdict.ABORT, {"a": 1, "b": 1})
    assert "another plan with this number" in outcome.reason
    assert (await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER)).number == 2


async def test_a_word_to_pause_for_another_plan_is_none_for_this_one(fleet: Fleet) -> None:
    await fleet.start("a", "b")
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    await fleet.register.create(pause_key(2), encode_pause("another"))
    applying, gate = await fleet.begin(3, ApplyOrder.BARRIER, "b")
    await until(lambda: (2, ApplyPhase.PREPARED) in fleet.members["a"].view.said)
    await asyncio.sleep(0.3)
    assert fleet.serving == {"a": 2, "b": 2}
    gate.set()
    # Nobody could be given the word any more.
    outcome = await applying
    assert (outcome.verdict, fleet.serving) == (Verdict.ABORT, {"a": 2, "b": 2})
    assert "another plan with this number" in outcome.reason
    assert (await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER)).number == 3


async def test_a_word_to_pause_ends_no_rolling_apply(fleet: Fleet) -> None:
    await fleet.start("a", "b")
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    await fleet.register.create(pause_key(2), b"{}")
    applying, gate = await fleet.begin(3, ApplyOrder.ROLLING, "b")
    await asyncio.sleep(LIMITS.undecided_s)
    gate.set()
    outcome = await applying
    assert outcome.verdict is Verdict.COMMIT, outcome.reason


def test_the_word_to_pause_of_a_release_that_names_no_plan_counts() -> None:
    assert is_pause_of(b"{}", "n")
    assert is_pause_of(encode_pause("n"), "n")
    assert not is_pause_of(encode_pause("another"), "n")


async def test_who_has_read_less_does_not_abort_what_was_committed(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put_back_past_a_commit(fleet, monkeypatch)
    fleet.thaw("b")
    # Its coordinator is gone, and `b` alone would abort it.
    await until(lambda: "because a has read a newer state" in fleet.members["b"].view.why)
    await until(lambda: fleet.members["b"].state.mode is HostMode.FENCED)
    assert await fleet.register.get(decision_key(2, 1)) is None
    assert fleet.serving == {"a": 3, "b": 0}
    # Nor is it aborted for another apply.
    with pytest.raises(WeightSyncError, match="because a takes no part"):
        await fleet.coordinator().apply(version(4), ApplyOrder.ROLLING)
    assert await fleet.register.get(decision_key(2, 1)) is None


async def test_who_was_away_hears_of_a_register_that_was_put_back(fleet: Fleet) -> None:
    await fleet.start("a", "c")
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    copy = records(fleet)
    fleet.freeze("c")
    await until(lambda: fleet.register._members.read("members+c") is None)
    await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER)
    put_back(fleet, copy)
    # It is there again before the other one has read it.
    fleet.thaw("c")
    await until(lambda: "because a has read a newer state" in fleet.members["c"].why)
    assert not fleet.members["c"]._journal.refusal


async def test_a_reading_is_compared_with_what_was_known_when_it_began(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.start("a", "b", "c")
    gate = fleet.hosts["c"].gate = asyncio.Event()
    applying = asyncio.create_task(fleet.coordinator().apply(version(2), ApplyOrder.ROLLING))
    member = fleet.members["b"]
    await until(lambda: _decisions(member) == 2)
    slow = FolderKeys(fleet.folder / "register")
    listed = slow.list

    async def late(prefix: str, start: str = "") -> dict[str, bytes]:
        found = await listed(prefix, start)
        if prefix.startswith("rosters/"):
            # The member of this host learns more meanwhile.
            gate.set()
            await until(lambda: _decisions(member) >= 3)
        return found

    monkeypatch.setattr(slow, "list", late)
    asked = await Coordinator(slow, "b", LIMITS, member._journal).abort()
    assert not member._journal.refusal
    assert asked is not None
    # Whatever came first.
    assert (await applying).verdict is asked.verdict


def _decisions(member: FleetMember) -> int:
    history = member.view.history
    return len(history.newest.decisions) if history is not None and history.newest else 0


async def test_who_is_behind_does_not_serve_on_beside_a_plan_that_it_cannot_read(
    fleet: Fleet,
) -> None:
    await fleet.start("a", "c")
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    fleet.freeze("c")
    await until(lambda: fleet.register._members.read("members+c") is None)
    await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER)
    plan = decode_document(path_of(fleet, plan_key(2)).read_bytes())
    newer = encode_document(plan | {"format": 9, "number": 3, "nonce": "newer"})
    await fleet.register.create(plan_key(3), newer)
    fleet.thaw("c")
    await until(lambda: fleet.members["c"].view.number == 3)
    await fleet.until_serving(a=3, c=0)
    with pytest.raises(WeightSyncError, match="has format 9"):
        fleet.members["c"].permitted_s(version(2))
    assert (await fleet.coordinator().abort()).number == 3  # type: ignore[union-attr]  # it runs
    await fleet.until_serving(a=3, c=3)


async def test_who_begins_beside_a_plan_that_it_cannot_read_says_why_it_serves_nothing(
    fleet: Fleet,
) -> None:
    await fleet.start("a", "b")
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    await fleet.register.create(plan_key(2), b"junk")
    await until(lambda: fleet.members["a"].view.number == 2)
    await fleet.kill("a")
    await MemberJournal(fleet.folder / "a" / "journal.json").stop(1)
    await until(lambda: fleet.register._members.read("members+a") is None)
    await fleet.start("a")
    # It may be a barrier that is just being decided.
    await until(lambda: plan_key(2) in fleet.members["a"].why)
    assert fleet.serving == {"a": 0, "b": 2}
    await fleet.coordinator().abort()
    await fleet.until_serving(a=2, b=2)


async def test_one_that_was_fenced_serves_again_while_others_prepare(fleet: Fleet) -> None:
    limits = replace(LIMITS, max_age_s=0.8, prepare_s=60.0, undecided_s=60.0)
    await fleet.start("a", "b", limits=limits)
    await fleet.coordinator(limits).apply(version(2), ApplyOrder.BARRIER)
    applying, gate = await fleet.begin(3, ApplyOrder.BARRIER, "b", limits)
    await until(lambda: (2, ApplyPhase.PREPARED) in fleet.members["a"].view.said)
    fleet.links["a"].cut = True
    await fleet.until_serving(a=0, b=2)
    fleet.links["a"].cut = False
    await fleet.until_serving(a=2, b=2)
    gate.set()
    assert (await applying).verdict is Verdict.COMMIT
    await fleet.until_serving(a=3, b=3)


async def test_one_that_missed_an_abort_serves_again_while_the_next_one_is_prepared(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = replace(LIMITS, undecided_s=20.0, prepare_s=60.0)
    await fleet.start("a", "b", limits=limits)
    await fleet.coordinator(limits).apply(version(2), ApplyOrder.BARRIER)
    hold = asyncio.Event()

    async def refused() -> None:
        await hold.wait()
        raise WeightSyncError(Reason.ENGINE_REFUSED, "no")

    with monkeypatch.context() as refusing:
        refusing.setattr(fleet.hosts["b"], "pause", refused)
        first = asyncio.create_task(fleet.coordinator(limits).apply(version(3), ApplyOrder.BARRIER))
        await until(lambda: fleet.members["a"].state.mode is HostMode.PAUSED)
        fleet.links["a"].cut = True
        hold.set()
        assert (await first).verdict is Verdict.ABORT
    await fleet.until_serving(a=0, b=2)
    gate = fleet.hosts["b"].gate = asyncio.Event()
    second = asyncio.create_task(fleet.coordinator(limits).apply(version(3), ApplyOrder.BARRIER))
    while await fleet.register.get(plan_key(3)) is None:  # noqa: ASYNC110 - a register is asked
        await asyncio.sleep(0.01)
    fleet.links["a"].cut = False
    await fleet.until_serving(a=2, b=2)
    gate.set()
    assert (await second).verdict is Verdict.COMMIT
    await fleet.until_serving(a=3, b=3)


async def test_what_is_accepted_while_one_is_away_is_accepted_there(fleet: Fleet) -> None:
    await fleet.start("a", "b")
    for number in (2, 3):
        await fleet.coordinator().apply(version(number), ApplyOrder.BARRIER)
    await fleet.coordinator().rollback(ApplyOrder.BARRIER)
    digest = version(3).digest
    await until(lambda: all(digest in host.rejected for host in fleet.hosts.values()))
    await fleet.kill("b")
    await until(lambda: fleet.register._members.read("members+b") is None)
    await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER, clears=True)
    await fleet.coordinator().apply(version(4), ApplyOrder.BARRIER)
    await fleet.start("b")
    await fleet.until_serving(a=4, b=4)
    await until(lambda: digest not in fleet.hosts["b"].rejected)
    assert (await fleet.coordinator().rollback(ApplyOrder.BARRIER)).verdict is Verdict.COMMIT
    assert fleet.serving == {"a": 3, "b": 3}


async def test_a_fault_while_a_host_prepares_fences_it_at_once(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.start("a")
    host, turn, never = fleet.hosts["a"], asyncio.Lock(), asyncio.Event()
    fence = host.fence

    async def prepare(*_: object) -> None:
        # One thing at a time, as of a real host.
        async with turn:
            await never.wait()

    async def fenced(reason: str) -> None:
        async with turn:
            await fence(reason)

    async def fails() -> bool:
        raise RuntimeError("a fault")

    monkeypatch.setattr(host, "prepare", prepare)
    monkeypatch.setattr(host, "fence", fenced)
    applying = asyncio.create_task(fleet.coordinator().apply(version(2), ApplyOrder.BARRIER))
    await until(turn.locked)
    monkeypatch.setattr(fleet.members["a"], "_announce", fails)
    await fleet.until_serving(a=0)
    applying.cancel()


async def test_who_announces_in_vain_announces_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.start("a")
    member = fleet.members["a"]
    said = member._announced
    with monkeypatch.context() as lost:

        async def unanswered(value: bytes) -> None:
            raise WeightSyncError(Reason.DEADLINE_EXCEEDED, "the answer was lost")

        lost.setattr(member.view.presence, "announce", unanswered)
        # Of what it says this alone is changed by no reading.
        lost.setattr(member, "_address", "x")
        await until(lambda: not member._announced)
    # What it said before is what it says again.
    await until(lambda: member._announced == said)


def test_the_journal_of_another_fleet_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.json"
    asyncio.run(MemberJournal(path, "one").see(Seen(40, "n", "COMMIT")))
    assert MemberJournal(path, "one").seen.number == 40
    with pytest.raises(WeightSyncError, match=r"start this server with --fleet one, or remove"):
        MemberJournal(path, "two")


async def test_reports_of_an_unreadable_plan_that_was_removed_end_the_next_one_once(
    fleet: Fleet,
) -> None:
    await fleet.start("a")
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    await fleet.register.create(plan_key(2), b"junk")
    while not await fleet.register.list(reports_prefix(2)):  # noqa: ASYNC110 - a register is asked
        await asyncio.sleep(0.01)
    path_of(fleet, plan_key(2)).unlink()
    await until(lambda: fleet.members["a"].view.number == 1)
    verdicts = [
        (await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER)).verdict for _ in range(2)
    ]
    assert verdicts == [Verdict.ABORT, Verdict.COMMIT]


async def test_a_late_decision_on_another_plan_takes_no_commit_back(fleet: Fleet) -> None:
    await fleet.start("a", "b")
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    # Of a rolling plan of that number before the register was put back; its coordinator was frozen.
    late = encode_verdict(Verdict.COMMIT, "x", nonce="another")
    await fleet.register.create(decision_key(1, 2), late)
    await asyncio.sleep(0.5)
    newest = (await HistoryReader(fleet.register).read()).newest
    refusals = {name: one._journal.refusal for name, one in fleet.members.items()}
    assert (newest.outcome, refusals) == (Verdict.COMMIT, {"a": "", "b": ""})  # type: ignore[union-attr]  # there is one


async def test_who_reads_a_commit_late_does_not_go_back(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = replace(LIMITS, undecided_s=20.0, settle_s=0.5)
    await fleet.start("a", "b", limits=limits)
    await fleet.coordinator(limits).apply(version(2), ApplyOrder.BARRIER)
    view = fleet.members["b"].view
    reading = view._read_once

    async def held() -> float:
        return await asyncio.sleep(0.01, 0.01)

    at_commit(monkeypatch, lambda: setattr(view, "_read_once", held))
    outcome = await fleet.coordinator(limits).apply(version(3), ApplyOrder.BARRIER)
    assert (outcome.verdict, fleet.serving) == (Verdict.COMMIT, {"a": 3, "b": 0})
    late = encode_verdict(Verdict.COMMIT, "x", nonce="another")
    await fleet.register.create(decision_key(2, 2), late)
    view._read_once = reading  # type: ignore[method-assign]
    await until(lambda: fleet.serving["b"])
    assert fleet.serving == {"a": 3, "b": 3}


async def test_a_late_decision_is_read_alike_from_a_cache_and_anew(fleet: Fleet) -> None:
    await fleet.start("a", "b")
    for number in (2, 3, 4):
        await fleet.coordinator().apply(version(number), ApplyOrder.BARRIER)
    cached = fleet.members["a"].view._reader
    await cached.read()
    late = encode_verdict(Verdict.COMMIT, "x", nonce="another")
    await fleet.register.create(decision_key(2, 2), late)
    old = [one.plan.number for one in (await cached.read()).commits]
    new = [one.plan.number for one in (await HistoryReader(fleet.register).read()).commits]
    assert old == new
    outcome = await fleet.coordinator().rollback(ApplyOrder.BARRIER)
    assert outcome.target == version(3)


async def test_who_has_what_was_aborted_does_not_serve_on_beside_a_plan_that_it_cannot_read(
    fleet: Fleet,
) -> None:
    limits = replace(LIMITS, prepare_s=2.0)
    await fleet.start("a", "b", limits=limits)
    await fleet.coordinator(limits).apply(version(2), ApplyOrder.BARRIER)
    gate = fleet.hosts["b"].gate = asyncio.Event()
    applying = asyncio.create_task(fleet.coordinator(limits).apply(version(3), ApplyOrder.ROLLING))
    await until(lambda: fleet.serving["a"] == 3)
    await until(lambda: (2, ApplyPhase.DONE) in fleet.members["a"].view.said)
    await fleet.register.create(plan_key(3), b"junk")
    await until(lambda: all(one.view.history.unreadable for one in fleet.members.values()))  # type: ignore[union-attr]  # they have started
    outcome = await applying
    gate.set()
    assert outcome.verdict is Verdict.ABORT
    await fleet.until_serving(a=0, b=2)
    # It goes back once nothing keeps it from that.
    await fleet.coordinator(limits).abort()
    await fleet.until_serving(a=2, b=2)


async def test_who_generates_since_before_a_start_and_is_behind_is_fenced_beside_such_a_plan(
    fleet: Fleet,
) -> None:
    await fleet.start("a", "c")
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    # Its server is away, its engines go on.
    await fleet.kill("c")
    await until(lambda: fleet.register._members.read("members+c") is None)
    await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER)
    await fleet.register.create(plan_key(3), b"junk")
    state = fleet.folder / "c" / "state.json"
    known = state.read_bytes()
    # As a real host, whose engines are not asked yet when its member begins.
    state.write_bytes(known.replace(known[known.index(b"[") : known.index(b"]") + 1], b"null", 1))
    starting = asyncio.create_task(fleet.start("c"))
    await until(lambda: "c" in fleet.members)
    state.write_bytes(known)
    await starting
    assert fleet.members["c"].view.history.unreadable  # type: ignore[union-attr]  # it has started
    await fleet.until_serving(a=3, c=0)
