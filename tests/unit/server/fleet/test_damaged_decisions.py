"""A record of what was decided is damaged: its key is named, and what the sentence says works."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.support.fleet_folder import path_of
from tests.support.fleet_hosts import version
from tests.support.fleet_tasks import LIMITS, until
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.decide import ApplyOrder, ApplyPhase, Verdict
from weightsync_server.fleet import coordinator as coordinators
from weightsync_server.fleet.coordinator import Coordinator
from weightsync_server.fleet.fleet_history import HistoryReader
from weightsync_server.fleet.fleet_records import decision_key, plan_key, roster_prefix
from weightsync_server.fleet_host.fleet_status import FleetStatusReader

if TYPE_CHECKING:
    from tests.support.fleet_tasks import Fleet


def damage(fleet: Fleet, key: str) -> None:
    path = fleet.folder / "register" / "records" / key.replace("/", "+")
    path.write_bytes(path.read_bytes().replace(b'"document"', b'"docu"'))


@pytest.mark.parametrize("key", [plan_key(2), decision_key(2, 1)])
async def test_a_barrier_leads_out_of_a_damaged_decision(fleet: Fleet, key: str) -> None:
    await fleet.start("a", "b")
    for number in (2, 3):
        await fleet.coordinator().apply(version(number), ApplyOrder.BARRIER)
    damage(fleet, key)
    await until(lambda: all(one.view.history.unreadable for one in fleet.members.values()))  # type: ignore[union-attr]  # they have started
    own = Coordinator(fleet.register, "a", LIMITS, fleet.members["a"]._journal)
    for call in (
        own.apply(version(4), ApplyOrder.ROLLING),
        own.rollback(ApplyOrder.BARRIER),
        own.abort(),
    ):
        with pytest.raises(WeightSyncError, match=f"^restore {key}, or apply") as caught:
            await call
        assert "`weightsync fleet apply VERSION --order barrier`" in caught.value.message
    status = await FleetStatusReader(fleet.register).status()
    assert (status.decided_version, status.newest.apply) == (0, 2)
    assert status.newest.reason.startswith(f"restore {key}")
    outcome = await own.apply(version(4), ApplyOrder.BARRIER)
    assert (outcome.verdict, outcome.lagging) == (Verdict.COMMIT, ())
    await fleet.until_serving(a=4, b=4)
    assert (await FleetStatusReader(fleet.register).status()).decided_version == 4


async def test_a_barrier_over_damage_that_fails_goes_back_to_what_all_held(fleet: Fleet) -> None:
    await fleet.start("a", "b")
    for number in (2, 3):
        await fleet.coordinator().apply(version(number), ApplyOrder.BARRIER)
    damage(fleet, plan_key(2))
    await fleet.until_serving(a=0, b=0)
    fleet.hosts["b"].refuses.add("prepare")
    outcome = await fleet.coordinator().apply(version(4), ApplyOrder.BARRIER)
    assert outcome.verdict is Verdict.ABORT
    await fleet.until_serving(a=3, b=3)


async def test_members_that_differ_are_not_led_out_by_guessing(fleet: Fleet) -> None:
    await fleet.start("a", "b")
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    fleet.hosts["b"].refuses.add("commit")
    limits = replace(LIMITS, settle_s=0.2)
    await fleet.coordinator(limits).apply(version(3), ApplyOrder.BARRIER)
    damage(fleet, plan_key(2))
    await until(lambda: fleet.members["a"].announced_live == version(3))
    with pytest.raises(WeightSyncError, match="the members hold different versions") as caught:
        await fleet.coordinator().apply(version(4), ApplyOrder.BARRIER)
    assert plan_key(2) in caught.value.message


async def test_a_damaged_roster_of_what_is_decided_stops_nobody(fleet: Fleet) -> None:
    await fleet.start("a")
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    newest = (await HistoryReader(fleet.register).read()).newest
    assert newest is not None
    damage(fleet, f"{roster_prefix(newest.plan.nonce)}000000")
    history = await HistoryReader(fleet.register).read()
    assert (history.unreadable, history.target) == ("", version(2))
    assert (await fleet.coordinator().apply(version(3), ApplyOrder.ROLLING)).lagging == ()


async def test_who_is_overtaken_waits_no_longer_and_is_told(fleet: Fleet) -> None:
    limits = replace(LIMITS, settle_s=60.0, undecided_s=20.0)
    await fleet.start("a", "b", limits=limits)
    commit = fleet.hosts["b"].commit
    held = asyncio.Event()

    async def late(target: object) -> None:
        await held.wait()
        await commit(target)  # type: ignore[arg-type]  # as it was called

    fleet.hosts["b"].commit = late  # type: ignore[method-assign]  # it is late
    first = asyncio.create_task(fleet.coordinator(limits).apply(version(2), ApplyOrder.BARRIER))
    await until(lambda: (1, ApplyPhase.DONE) in fleet.members["a"].view.said)
    second = asyncio.create_task(fleet.coordinator(limits).apply(version(3), ApplyOrder.BARRIER))
    outcome = await first
    assert (outcome.verdict, outcome.lagging) == (Verdict.COMMIT, ("b",))
    assert outcome.reason == "superseded by apply 2 before all members were confirmed live"
    held.set()
    assert (await second).verdict is Verdict.COMMIT
    report = await FleetStatusReader(fleet.register).report(1)
    assert [one.name for one in report.members] == ["a", "b"]


async def test_an_abort_that_the_register_does_not_take_has_an_end(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinators, "_ABORT_S", 0.5)
    await fleet.start("a")
    fleet.hosts["a"].gate = asyncio.Event()
    applying = asyncio.create_task(fleet.coordinator().apply(version(2), ApplyOrder.BARRIER))
    await until(lambda: fleet.members["a"].view.history.running)  # type: ignore[union-attr]  # it has started

    async def full(*_: object) -> None:
        raise WeightSyncError(Reason.DISK_EXHAUSTED, "no space")

    with monkeypatch.context() as broken:
        broken.setattr(fleet.register, "create", full)
        with pytest.raises(WeightSyncError, match="call again once the register accepts") as caught:
            await fleet.coordinator().abort()
    assert caught.value.reason is Reason.DEADLINE_EXCEEDED
    applying.cancel()


async def test_a_decision_that_is_lost_before_another_one_is_named_and_led_out_of(
    fleet: Fleet,
) -> None:
    await fleet.start("a", "b")
    await fleet.coordinator().apply(version(2), ApplyOrder.ROLLING)
    for name in "ab":
        await fleet.kill(name)
        # Nobody remembers it, as where the register was moved to fresh hosts.
        (fleet.folder / name / "journal.json").unlink()
        await until(lambda name=name: fleet.register._members.read(f"members+{name}") is None)
    # Of three decisions the second one is there alone.
    for step in (1, 3):
        path_of(fleet, decision_key(1, step)).unlink()
    lost = f"restore {decision_key(1, 1)}"
    coordinator = fleet.coordinator()
    for call in (coordinator.abort(), coordinator.apply(version(3), ApplyOrder.ROLLING)):
        with pytest.raises(WeightSyncError, match=lost):
            await call
    await fleet.start("a", "b")
    await until(lambda: all(lost in one.why for one in fleet.members.values()))
    assert fleet.serving == {"a": 0, "b": 0}
    assert (await coordinator.apply(version(3), ApplyOrder.BARRIER)).verdict is Verdict.COMMIT
    await fleet.until_serving(a=3, b=3)
