"""Content that a rollback has rejected is accepted again by an apply that says so, everywhere."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.support.fleet_hosts import version
from tests.support.fleet_tasks import LIMITS, until
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.decide import ApplyOrder, DecisionPlan, Verdict
from weightsync_server.fleet.fleet_history import HistoryReader, keep_marks
from weightsync_server.fleet.fleet_records import rejected_key
from weightsync_server.fleet.member_journal import MemberJournal

if TYPE_CHECKING:
    from tests.support.fleet_tasks import Fleet


THIRD = version(3).digest


async def reject_third(fleet: Fleet, kind: ApplyOrder) -> None:
    """Have a fleet that serves 2 and has rejected 3, which all hosts know."""
    for number in (2, 3):
        await fleet.coordinator().apply(version(number), kind)
    assert (await fleet.coordinator().rollback(kind)).target == version(2)
    await until(lambda: all(THIRD in host.rejected for host in fleet.hosts.values()))


async def rejects(fleet: Fleet) -> frozenset[str]:
    return (await HistoryReader(fleet.register).read()).rejects


@pytest.mark.parametrize("kind", ApplyOrder)
async def test_an_apply_that_clears_is_accepted_by_all_and_can_be_rejected_again(
    fleet: Fleet, kind: ApplyOrder
) -> None:
    await fleet.start("a", "b")
    await reject_third(fleet, kind)
    with pytest.raises(WeightSyncError, match="or set clear_rejected to have the fleet") as caught:
        await fleet.coordinator().apply(version(3), kind)
    assert caught.value.reason is Reason.VERSION_REJECTED
    outcome = await fleet.coordinator().apply(version(3), kind, clears=True)
    assert outcome.verdict is Verdict.COMMIT
    assert fleet.serving == {"a": 3, "b": 3}
    assert not any(host.rejected for host in fleet.hosts.values())
    # From now on it is as any other; another number of the same content as well.
    assert THIRD not in await rejects(fleet)
    await fleet.coordinator().apply(version(4), kind)
    again = replace(version(3), number=5)
    assert (await fleet.coordinator().apply(again, kind)).verdict is Verdict.COMMIT
    # And a rollback after that rejects it once more.
    await fleet.coordinator().rollback(kind)
    await until(lambda: all(THIRD in host.rejected for host in fleet.hosts.values()))
    with pytest.raises(WeightSyncError, match="was rejected by a rollback"):
        await fleet.coordinator().apply(replace(version(3), number=6), kind)


@pytest.mark.parametrize("kind", ApplyOrder)
async def test_one_that_is_decided_against_clears_nothing(fleet: Fleet, kind: ApplyOrder) -> None:
    await fleet.start("a", "b")
    await reject_third(fleet, kind)
    fleet.hosts["b"].refuses = {"prepare"}
    outcome = await fleet.coordinator().apply(version(3), kind, clears=True)
    assert outcome.verdict is Verdict.ABORT
    assert THIRD in await rejects(fleet)
    await fleet.until_serving(a=2, b=2)
    await until(lambda: all(THIRD in host.rejected for host in fleet.hosts.values()))


async def test_one_that_was_away_accepts_it_when_it_comes_back(fleet: Fleet) -> None:
    await fleet.start("a", "b")
    await reject_third(fleet, ApplyOrder.BARRIER)
    await fleet.kill("b")
    await asyncio.sleep(1.5)
    outcome = await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER, clears=True)
    assert outcome.verdict is Verdict.COMMIT
    await fleet.start("b")
    await fleet.until_serving(a=3, b=3)
    assert not fleet.hosts["b"].rejected


async def test_what_was_said_last_counts_whoever_writes_it_late(fleet: Fleet) -> None:
    await fleet.start("a")
    await reject_third(fleet, ApplyOrder.BARRIER)
    await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER, clears=True)
    # The plans go; the marks of their contents stay, each with the number of its apply.
    for number in range(4, 20):
        await fleet.coordinator().apply(version(number), ApplyOrder.BARRIER)
    history = await HistoryReader(fleet.register).read()
    assert history.floor > 4
    assert THIRD not in history.rejects
    # A member that was frozen in the rollback wakes up, and so does its coordinator.
    await fleet.register.create(rejected_key(THIRD), b"{}")
    plan = DecisionPlan(
        3, "n", ApplyOrder.BARRIER, version(2), version(3), (("a",),), 1, rejects=THIRD
    )
    await keep_marks(fleet.register, [plan])
    assert THIRD not in await rejects(fleet)
    again = replace(version(3), number=20)
    assert (await fleet.coordinator().apply(again, ApplyOrder.BARRIER)).verdict is Verdict.COMMIT
    await fleet.coordinator().rollback(ApplyOrder.BARRIER)
    for number in range(21, 37):
        await fleet.coordinator().apply(version(number), ApplyOrder.BARRIER)
    assert THIRD in await rejects(fleet)


async def test_a_rollback_rejects_also_where_its_coordinator_died(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.start("a")
    for number in (2, 3):
        await fleet.coordinator().apply(version(number), ApplyOrder.BARRIER)
    await roll_back_without_marks(fleet, monkeypatch)
    await until(lambda: THIRD in fleet.hosts["a"].rejected)
    with pytest.raises(WeightSyncError, match="was rejected by a rollback"):
        await fleet.coordinator().apply(replace(version(3), number=4), ApplyOrder.BARRIER)
    await fleet.coordinator().apply(version(4), ApplyOrder.BARRIER)
    assert THIRD in await rejects(fleet)
    for number in range(5, 20):
        await fleet.coordinator().apply(version(number), ApplyOrder.BARRIER)
    history = await HistoryReader(fleet.register).read()
    assert history.floor > 4
    assert any(mark.number == 3 and mark.rejected for mark in history.marks)


async def roll_back_without_marks(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Roll back by a coordinator that dies as soon as that is decided."""
    coordinator = fleet.coordinator()

    async def dies(*_: object) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(coordinator, "_settled", dies)
    with pytest.raises(asyncio.CancelledError):
        await coordinator.rollback(ApplyOrder.BARRIER)
    await until(lambda: fleet.serving == {"a": 2})


async def full(digest: str) -> None:
    raise WeightSyncError(Reason.DISK_EXHAUSTED, "the disk is full")


async def test_one_that_cannot_accept_old_content_is_live_all_the_same(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    await fleet.start("a", "b")
    await reject_third(fleet, ApplyOrder.BARRIER)
    await fleet.kill("b")
    await until(lambda: fleet.register._members.read("members+b") is None)
    await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER, clears=True)
    await fleet.coordinator().apply(version(4), ApplyOrder.BARRIER)
    starting = asyncio.create_task(fleet.start("b", limits=replace(LIMITS, retry_s=1.0)))
    await until(lambda: "b" in fleet.members)
    accept = fleet.hosts["b"].accept
    fleet.hosts["b"].accept = full  # type: ignore[method-assign]  # it fails
    await starting
    await fleet.until_serving(a=4, b=4)
    outcome = await fleet.coordinator().apply(version(5), ApplyOrder.BARRIER)
    assert (outcome.verdict, outcome.lagging, fleet.serving["b"]) == (Verdict.COMMIT, (), 5)
    await asyncio.sleep(0.5)
    # It is told, and tried again now and then.
    told = f"could not take content {THIRD} of its fleet: the disk is full"
    assert 1 <= caplog.text.count(told) < 5
    fleet.hosts["b"].accept = accept  # type: ignore[method-assign]  # as it was
    await until(lambda: THIRD not in fleet.hosts["b"].rejected)


async def test_one_that_cannot_accept_what_it_serves_serves_it(fleet: Fleet) -> None:
    await fleet.start("a")
    await reject_third(fleet, ApplyOrder.BARRIER)
    await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER, clears=True)
    await fleet.kill("a")
    await until(lambda: fleet.register._members.read("members+a") is None)
    await MemberJournal(fleet.folder / "a" / "journal.json").stop(1)
    starting = asyncio.create_task(fleet.start("a"))
    await until(lambda: "a" in fleet.members)
    fleet.hosts["a"].accept = full  # type: ignore[method-assign]  # it fails
    await starting
    await fleet.until_serving(a=3)


@pytest.mark.parametrize("kind", ApplyOrder)
async def test_one_that_cannot_accept_says_why(fleet: Fleet, kind: ApplyOrder) -> None:
    await fleet.start("a", "b")
    await reject_third(fleet, kind)
    fleet.hosts["b"].accept = full  # type: ignore[method-assign]  # it fails
    outcome = await fleet.coordinator().apply(version(3), kind, clears=True)
    assert outcome.verdict is Verdict.ABORT
    assert outcome.reason == "b is not prepared: the disk is full"
    await fleet.until_serving(a=2, b=2)


async def test_what_a_host_rejects_by_itself_stays_so_over_a_start(fleet: Fleet) -> None:
    await fleet.start("a")
    await reject_third(fleet, ApplyOrder.BARRIER)
    await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER, clears=True)
    await fleet.coordinator().apply(version(4), ApplyOrder.BARRIER)
    host, path = fleet.hosts["a"], fleet.folder / "a" / "journal.json"
    await until(lambda: MemberJournal(path).followed == 4)
    # As of what a rank refuses for its content.
    await host.reject(THIRD, "every rank refused it")
    for _ in range(2):
        await fleet.kill("a")
        await until(lambda: fleet.register._members.read("members+a") is None)
        await fleet.start("a")
        await asyncio.sleep(0.3)
        assert THIRD in fleet.hosts["a"].rejected
    # Who asks for it again has it accepted here, too; and what is accepted meanwhile elsewhere.
    again = replace(version(3), number=5)
    outcome = await fleet.coordinator().apply(again, ApplyOrder.BARRIER, clears=True)
    assert (outcome.verdict, outcome.reason) == (Verdict.COMMIT, "")
    assert THIRD not in fleet.hosts["a"].rejected
