"""Members whose link, register, coordinator or own process is lost: what they serve meanwhile."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.support.fleet_hosts import FileHost, make_member, version
from tests.support.fleet_tasks import LIMITS, until
from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.coordination.folder_keys import FolderKeys
from weightsync_server.decide import ApplyOrder, FleetVersion, Verdict
from weightsync_server.fleet.fleet_history import HistoryReader, Seen
from weightsync_server.fleet.fleet_records import (
    MEMBERS,
    decide,
    decision_key,
    encode_verdict,
    member_key,
)
from weightsync_server.fleet.member_journal import MemberJournal
from weightsync_server.fleet.member_steps import HostMode

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.fleet_tasks import Fleet

pytestmark = pytest.mark.timeout(30)


async def paused_without_link(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, verdict: Verdict
) -> None:
    """Cut `b` off once it stands still, then let the fleet decide."""
    await fleet.start("a", "b", "c")

    async def cut_first(*args: object, **given: object) -> Verdict:
        fleet.links["b"].cut = True
        await asyncio.sleep(0.2)
        if verdict is Verdict.ABORT:
            await fleet.register.create(decision_key(1, 1), encode_verdict(verdict, "other"))
        return await decide(*args, **given)  # type: ignore[arg-type,return-value]  # as it was called

    monkeypatch.setattr("weightsync_server.fleet.coordinator.decide", cut_first)
    outcome = await fleet.coordinator(replace(LIMITS, settle_s=0.2)).apply(
        version(2), ApplyOrder.BARRIER
    )
    assert outcome.verdict is verdict


@pytest.mark.parametrize("verdict", Verdict)
async def test_one_that_cannot_learn_the_decision_fences_itself(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, verdict: Verdict
) -> None:
    await paused_without_link(fleet, monkeypatch, verdict)
    decided = 2 if verdict is Verdict.COMMIT else 1
    await fleet.until_serving(a=decided, b=0, c=decided)
    assert _mode(fleet, "b") is HostMode.PAUSED
    await until(lambda: _mode(fleet, "b") is HostMode.FENCED)
    await asyncio.sleep(0.5)
    assert fleet.serving["b"] == 0
    fleet.links["b"].cut = False
    await fleet.until_serving(a=decided, b=decided, c=decided)
    # It never served the old version again before it knew.
    served = [number for _, number in fleet.hosts["b"].log]
    assert served == [1, 0, 0, decided]


@pytest.mark.parametrize("verdict", Verdict)
async def test_one_that_comes_back_undecided_serves_nothing_until_it_knows(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, verdict: Verdict
) -> None:
    await paused_without_link(fleet, monkeypatch, verdict)
    decided = 2 if verdict is Verdict.COMMIT else 1
    await fleet.kill("b")
    await fleet.start("b")
    await fleet.until_serving(a=decided, b=decided, c=decided)
    assert [number for _, number in fleet.hosts["b"].log] == [1, 0, 0, decided]


async def test_a_report_that_was_not_taken_is_made_again(fleet: Fleet) -> None:
    limits = replace(LIMITS, undecided_s=10.0)
    await fleet.start("a", "b", limits=limits)
    applying, gate = await fleet.begin(2, ApplyOrder.BARRIER, "b", limits)
    fleet.links["b"].cut = True
    gate.set()
    await asyncio.sleep(1)
    fleet.links["b"].cut = False
    assert (await applying).verdict is Verdict.COMMIT
    assert fleet.serving == {"a": 2, "b": 2}


async def test_a_host_is_asked_for_one_thing_at_a_time(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.start("a")
    host, running, most = fleet.hosts["a"], set(), []

    async def prepare(target: FleetVersion, _: object = None) -> None:
        running.add(target)
        most.append(len(running))
        try:
            await asyncio.sleep(30 if target.number == 2 else 0)
        finally:
            # What is given up has to be put back.
            await asyncio.sleep(0.2)
            running.remove(target)

    monkeypatch.setattr(host, "prepare", prepare)
    first = asyncio.create_task(fleet.coordinator().apply(version(2), ApplyOrder.BARRIER))
    await until(lambda: running)
    await fleet.register.create(decision_key(1, 1), encode_verdict(Verdict.ABORT, "other"))
    assert (
        await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER)
    ).verdict is Verdict.COMMIT
    assert (await first).verdict is Verdict.ABORT
    assert set(most) == {1}
    assert len(most) == 2


@pytest.mark.parametrize("cut", [False, True], ids=["reachable", "cut"])
async def test_one_that_stood_still_does_not_commit_what_was_decided_before(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, cut: bool
) -> None:
    limits = replace(LIMITS, settle_s=2)
    await fleet.start("a", "b", "c")
    held, goes_on = asyncio.Event(), asyncio.Event()
    commit = fleet.members["b"]._journal.stop

    async def stand_still(number: int) -> None:
        await commit(number)
        if number == 0 and not held.is_set():
            # It has read COMMIT, and is not seen any more from here on.
            fleet.freeze("b")
            held.set()
            await goes_on.wait()
            fleet.thaw("b")
            fleet.links["b"].cut = cut

    monkeypatch.setattr(fleet.members["b"]._journal, "stop", stand_still)
    outcome = await fleet.coordinator(limits).apply(version(2), ApplyOrder.BARRIER)
    assert (outcome.verdict, outcome.lagging) == (Verdict.COMMIT, ("b",))
    await held.wait()
    await until(lambda: _gone(fleet, "b"))
    assert (await fleet.coordinator(limits).apply(version(3), ApplyOrder.BARRIER)).lagging == ()
    goes_on.set()
    if cut:
        await asyncio.sleep(1)
        assert fleet.serving == {"a": 3, "b": 0, "c": 3}
        fleet.links["b"].cut = False
    await fleet.until_serving(a=3, b=3, c=3)
    assert 2 not in {number for _, number in fleet.hosts["b"].log}


async def test_a_host_goes_over_only_while_others_wait_for_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.start("a")
    member = fleet.members["a"]
    left: list[float] = []

    async def commit(target: FleetVersion) -> None:
        left.append(member.permitted_s(target))
        fleet.freeze("a")
        await until(lambda: not member.view.presence.counts)
        with pytest.raises(WeightSyncError, match="may have decided without it"):
            member.permitted_s(target)
        fleet.thaw("a")
        raise WeightSyncError(Reason.ENGINE_AWAY, "it was not allowed to serve")

    with monkeypatch.context() as patch:
        patch.setattr(fleet.hosts["a"], "commit", commit)
        await fleet.coordinator(replace(LIMITS, settle_s=0.1)).apply(version(2), ApplyOrder.BARRIER)
        await until(lambda: left)
    assert 0 < left[0] <= 1
    await fleet.until_serving(a=2)
    # One that comes back with what was left may not serve it.
    with pytest.raises(WeightSyncError, match="version 2 was decided") as caught:
        member.permitted_s(version(1))
    assert caught.value.reason is Reason.ENGINE_AWAY


async def test_of_two_with_one_name_the_later_one_serves(fleet: Fleet) -> None:
    await fleet.start("a")
    register = FolderKeys(fleet.folder / "register")
    other = make_member(register, fleet.folder / "elsewhere" / "a", LIMITS)
    following = asyncio.create_task(other.run())
    await fleet.until_serving(a=0)
    assert "fence" in {what for what, _ in fleet.hosts["a"].log}
    assert (await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)).lagging == ()
    await asyncio.sleep(1.5)
    host = FileHost(fleet.folder / "elsewhere" / "a")
    assert (host.serves, fleet.serving["a"]) == (2, 0)
    assert (await fleet.coordinator().apply(version(3), ApplyOrder.ROLLING)).lagging == ()
    assert (host.serves, fleet.serving["a"]) == (3, 0)
    following.cancel()
    await asyncio.wait({following})
    # Its name is its own again.
    await fleet.until_serving(a=3)
    assert (await fleet.coordinator().apply(version(4), ApplyOrder.BARRIER)).lagging == ()
    assert fleet.serving["a"] == 4


async def test_a_lost_register_stops_nobody_without_a_limit(fleet: Fleet) -> None:
    await fleet.start("a")
    fleet.links["a"].cut = True
    await until(lambda: fleet.members["a"].view.why)
    await asyncio.sleep(0.5)
    assert fleet.serving == {"a": 1}


async def test_beyond_max_age_nothing_is_served(fleet: Fleet) -> None:
    await fleet.start("a", limits=replace(LIMITS, max_age_s=0.4))
    fleet.links["a"].cut = True
    await fleet.until_serving(a=0)
    fleet.links["a"].cut = False
    await fleet.until_serving(a=1)


@pytest.mark.parametrize(("max_skew", "fenced"), [(0, True), (1, False)])
async def test_a_host_behind_serves_as_far_as_max_skew(
    fleet: Fleet, max_skew: int, fenced: bool
) -> None:
    await fleet.start("a")
    await fleet.start("b", limits=replace(LIMITS, max_skew=max_skew))
    await fleet.coordinator().apply(version(2), ApplyOrder.ROLLING)
    await fleet.kill("b")
    await until(lambda: _gone(fleet, "b"))
    await fleet.coordinator().apply(version(3), ApplyOrder.ROLLING)
    await fleet.start("b", limits=replace(LIMITS, max_skew=max_skew))
    await fleet.until_serving(a=3, b=3)
    behind = [what for what, _ in fleet.hosts["b"].log[2:]]
    assert behind == (["fence", "commit"] if fenced else ["commit"])


async def test_members_abort_what_their_coordinator_left(fleet: Fleet) -> None:
    await fleet.start("a", "b")
    applying, gate = await fleet.begin(2, ApplyOrder.BARRIER, "a")
    applying.cancel()
    await asyncio.wait({applying})
    reader = HistoryReader(fleet.register)
    while (  # noqa: ASYNC110 - a register is asked
        newest := (await reader.read()).newest
    ) is None or newest.outcome is None:
        await asyncio.sleep(0.05)
    assert (newest.outcome, newest.reason) == (Verdict.ABORT, "its coordinator has exited")
    gate.set()
    again = await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER)
    assert again.verdict is Verdict.COMMIT
    assert fleet.serving == {"a": 3, "b": 3}


async def test_another_coordinator_takes_a_plan_over(fleet: Fleet) -> None:
    await fleet.start("a", "b", limits=replace(LIMITS, grace_s=30.0))
    applying, gate = await fleet.begin(2, ApplyOrder.ROLLING, "a")
    applying.cancel()
    await asyncio.wait({applying})
    gate.set()
    assert (await fleet.coordinator().drive(1)).verdict is Verdict.COMMIT
    assert fleet.serving == {"a": 2, "b": 2}


@pytest.mark.parametrize("kind", ApplyOrder)
async def test_a_member_that_is_not_ready_in_time_aborts_the_apply(
    fleet: Fleet, kind: ApplyOrder
) -> None:
    await fleet.start("a", "b")
    fleet.hosts["b"].gate = asyncio.Event()
    coordinator = fleet.coordinator(replace(LIMITS, prepare_s=1.0))
    outcome = await coordinator.apply(version(2), kind)
    assert (outcome.verdict, outcome.reason) == (Verdict.ABORT, "b did not answer in time")
    await fleet.until_serving(a=1, b=1)


@pytest.mark.parametrize("kind", ApplyOrder)
async def test_a_member_that_dies_before_it_is_ready_is_not_waited_for(
    fleet: Fleet, kind: ApplyOrder
) -> None:
    await fleet.start("a", "b")
    applying, _ = await fleet.begin(2, kind, "b", replace(LIMITS, prepare_s=3600.0))
    await fleet.kill("b")
    outcome = await applying
    assert outcome.verdict is Verdict.ABORT
    assert outcome.reason.startswith("b is no longer in the fleet's register")
    await fleet.start("b")
    await fleet.until_serving(a=1, b=1)


async def test_a_register_that_was_emptied_is_not_followed(fleet: Fleet) -> None:
    await fleet.start("a")
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    for file in (fleet.folder / "register" / "records").iterdir():
        file.unlink()
    await until(
        lambda: "it was emptied or restored from an older copy" in fleet.members["a"].view.why
    )
    assert fleet.serving == {"a": 2}


@pytest.mark.parametrize("kind", ApplyOrder)
@pytest.mark.parametrize("late", [False, True], ids=["before", "after it is ready"])
async def test_one_whose_disk_is_full_says_so(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, kind: ApplyOrder, late: bool
) -> None:
    await fleet.start("a", "b")
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    journal = fleet.members["b"]._journal

    async def full(stopped_in: int, seen: Seen) -> None:
        if (stopped_in, seen) != (journal.stopped_in, journal.seen) and not (
            late and not stopped_in
        ):
            raise WeightSyncError(Reason.DISK_EXHAUSTED, "writing fleet.json: no space left")

    monkeypatch.setattr(journal, "_write", full)
    outcome = await fleet.coordinator().apply(version(3), kind)
    assert outcome.verdict is Verdict.ABORT
    assert outcome.reason.startswith("b is not ")
    assert "no space left" in outcome.reason
    await fleet.until_serving(a=2, b=2)


async def test_a_damaged_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.json"
    journal = MemberJournal(path)
    await journal.stop(0)
    assert MemberJournal(path).stopped_in
    await journal.see(Seen(7))
    await journal.stop(0)
    again = MemberJournal(path)
    assert (again.seen, again.stopped_in) == (Seen(7), 7)
    await again.serve()
    assert MemberJournal(path).stopped_in == 0
    path.write_text("{}")
    with pytest.raises(WeightSyncError, match="cannot know whether it may serve") as caught:
        MemberJournal(path)
    assert caught.value.reason == Reason.DATA_CORRUPT
    shutil.rmtree(tmp_path)
    with pytest.raises(WeightSyncError, match=r"writing .* failed"):
        await again.see(Seen(8))
    assert again.seen == Seen(7)


def _mode(fleet: Fleet, name: str) -> HostMode:
    return fleet.members[name].state.mode


def _gone(fleet: Fleet, name: str) -> bool:
    return fleet.register._members.read(f"members+{name}") is None


async def test_one_that_is_begun_anew_is_there_and_was_not_meanwhile(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.start("a")
    member = fleet.members["a"]
    before = clock.boottime()

    async def fail() -> float:
        raise RuntimeError

    with monkeypatch.context() as broken:
        broken.setattr(member.view, "_read_once", fail)
        await until(fleet._tasks["a"].done)
    assert fleet._tasks["a"].exception()
    assert not (await fleet.register.members(MEMBERS)).alive
    # Nobody has seen it since, whatever time it had left.
    assert not member.view.presence.counts
    fleet._tasks["a"] = asyncio.create_task(member.run())
    await until(lambda: member.view.presence.counts)
    assert list((await fleet.register.members(MEMBERS)).alive) == [member_key("a")]
    membership = member.view.presence._membership
    assert membership is not None
    assert not membership.is_seen_since(before)
    await fleet.until_serving(a=1)


async def test_a_fault_of_its_reading_is_a_register_that_is_away(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.start("a", limits=replace(LIMITS, max_age_s=1.0))
    member = fleet.members["a"]
    with monkeypatch.context() as broken:
        broken.setattr(member.view._reader, "read", _fail)
        await until(lambda: "this server failed (ValueError('x'))" in member.view.why)
        assert list((await fleet.register.members(MEMBERS)).alive) == [member_key("a")]
        assert not fleet._tasks["a"].done()
        await fleet.until_serving(a=0)
    await fleet.until_serving(a=1)


async def _fail(*_: object) -> None:
    raise ValueError("x")


async def test_a_fault_of_a_step_is_tried_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.start("a")
    with monkeypatch.context() as broken:
        broken.setattr(fleet.hosts["a"], "prepare", _fail)
        outcome = await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    assert (outcome.verdict, outcome.reason) == (Verdict.ABORT, "a is not prepared: x")
    await until(lambda: fleet.serving == {"a": 1})
    assert not fleet._tasks["a"].done()
    assert (await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER)).lagging == ()


async def test_one_whose_loop_ends_serves_nothing_before_it_is_gone(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.start("a")
    member, served = fleet.members["a"], []
    close = member.view.presence.close

    async def see() -> None:
        served.append(fleet.serving["a"])
        await close()

    def fail(*_: object) -> None:
        raise ValueError("x")

    monkeypatch.setattr(member.view.presence, "close", see)
    with monkeypatch.context() as broken:
        broken.setattr("weightsync_server.fleet.fleet_member.next_step", fail)
        await until(fleet._tasks["a"].done)
    assert fleet._tasks["a"].exception()
    assert served == [0]
    assert not (await fleet.register.members(MEMBERS)).alive
    fleet._tasks["a"] = asyncio.create_task(member.run())
    await fleet.until_serving(a=1)


async def test_who_is_behind_goes_first_to_what_was_decided(fleet: Fleet) -> None:
    limits = replace(LIMITS, prepare_s=60.0)
    await fleet.start("a", "c", limits=limits)
    await fleet.coordinator(limits).apply(version(2), ApplyOrder.BARRIER)
    fleet.freeze("c")
    await until(lambda: fleet.register._members.read("members+c") is None)
    await fleet.coordinator(limits).apply(version(3), ApplyOrder.BARRIER)
    gate = fleet.hosts["a"].gate = asyncio.Event()
    # It is seen, and reads nothing yet.
    fleet.thaw("c")
    fleet.links["c"].cut = True
    await until(lambda: fleet.register._members.read("members+c"))
    applying = asyncio.create_task(fleet.coordinator(limits).apply(version(4), ApplyOrder.ROLLING))
    await until(lambda: fleet.members["a"].view.history.running)  # type: ignore[union-attr]  # it has started
    fleet.links["c"].cut = False
    await fleet.until_serving(a=3, c=3)
    gate.set()
    assert (await applying).verdict is Verdict.COMMIT
    await fleet.until_serving(a=4, c=4)
