"""Members and a coordinator over one register: what becomes live, and what does not."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.support.fleet_hosts import version
from tests.support.fleet_tasks import LIMITS, CutRegister, until
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.decide import ApplyOrder, DecisionPlan, Verdict
from weightsync_server.fleet.coordinator import Coordinator
from weightsync_server.fleet.fleet_history import History, HistoryReader
from weightsync_server.fleet.fleet_records import (
    decide,
    decision_key,
    encode_plan,
    encode_verdict,
    plan_key,
)
from weightsync_server.fleet.plan_checks import previous_of
from weightsync_server.fleet_host.fleet_service import FleetNeeds
from weightsync_server.fleet_host.fleet_status import FleetStatusReader

if TYPE_CHECKING:
    from tests.support.fleet_tasks import Fleet
    from weightsync_server.decide import Reports
    from weightsync_server.fleet.fleet_history import Apply


@pytest.mark.parametrize("kind", ApplyOrder)
async def test_an_apply_is_live_on_every_member(
    fleet: Fleet, kind: ApplyOrder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "weightsync_server.fleet.coordinator")
    await fleet.start("a", "b", "c")
    coordinator = fleet.coordinator()
    for number in (2, 3):
        outcome = await coordinator.apply(version(number), kind)
        assert (outcome.verdict, outcome.lagging) == (Verdict.COMMIT, ())
        assert fleet.serving == {"a": number, "b": number, "c": number}
    again = await coordinator.apply(version(3), kind)
    assert again.verdict is Verdict.COMMIT
    progress = [message for message in caplog.messages if "of the fleet:" in message]
    assert progress[-1].endswith(" 3 done")
    assert len(set(progress)) == len(progress), "each step is logged once"
    assert len(progress) <= 6, "at INFO, of three applies: a decision and an end"
    for host in fleet.hosts.values():
        paused = [what for what, _ in host.log].count("pause")
        assert paused == (3 if kind is ApplyOrder.BARRIER else 0)


async def test_a_key_is_one_apply_of_the_fleet(fleet: Fleet) -> None:
    await fleet.start("a", "b")
    first = await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER, key="k")
    assert (await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER, key="k")) == first
    assert (
        await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    ).number == first.number + 1
    with pytest.raises(WeightSyncError, match="use a key for one call only") as caught:
        await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER, key="k")
    assert caught.value.reason is Reason.VERSION_CONFLICT
    with pytest.raises(WeightSyncError, match="use a key for one call only"):
        await fleet.coordinator().rollback(ApplyOrder.BARRIER, key="k")
    back = await fleet.coordinator().rollback(ApplyOrder.BARRIER, key="back")
    assert await fleet.coordinator().rollback(ApplyOrder.BARRIER, key="back") == back
    assert fleet.serving == {"a": 1, "b": 1}


@pytest.mark.parametrize("kind", ApplyOrder)
@pytest.mark.parametrize("what", ["prepare", "pause", "commit"])
async def test_what_one_refuses(fleet: Fleet, kind: ApplyOrder, what: str) -> None:
    await fleet.start("a", "b", "c")
    host, last = fleet.hosts["b"], fleet.members["c"]
    host.refuses, host.gate = {what}, asyncio.Event()
    coordinator = fleet.coordinator(replace(LIMITS, settle_s=2))
    applying = asyncio.create_task(coordinator.apply(version(2), kind))
    # An apply that is refused sooner finds nothing prepared elsewhere. The last one stays ready
    # until the one before it is; the wave before both waits for neither.
    await until(lambda: last.state.prepared is not None)
    if kind is ApplyOrder.ROLLING:
        await fleet.until_serving(a=2, b=1, c=1)
    host.gate.set()
    outcome = await applying
    if kind is ApplyOrder.BARRIER and what == "commit":
        # It was decided: who cannot follow serves nothing, and goes on trying.
        assert (outcome.verdict, outcome.lagging) == (Verdict.COMMIT, ("b",))
        assert fleet.serving == {"a": 2, "b": 0, "c": 2}
        fleet.hosts["b"].refuses = set()
        await fleet.until_serving(a=2, b=2, c=2)
        return
    if kind is ApplyOrder.ROLLING and what == "pause":
        assert outcome.verdict is Verdict.COMMIT  # nobody is asked to
        return
    assert outcome.verdict is Verdict.ABORT
    assert f"{what} is refused" in outcome.reason
    await fleet.until_serving(a=1, b=1, c=1)
    if what == "prepare":
        # What another one has prepared is let go.
        await until(lambda: ("resume", 1) in fleet.hosts["c"].log)
    # The wave before went, and came back by the decision.
    went = any(number == 2 for _, number in fleet.hosts["a"].log)
    assert went == (kind is ApplyOrder.ROLLING)
    assert all(number != 2 for _, number in fleet.hosts["c"].log)


async def test_one_wave_at_a_time(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    await fleet.start("a", "b", "c", "d")
    steps: list[tuple[int, dict[str, int]]] = []
    coordinator = fleet.coordinator()
    read = coordinator._reports

    async def noted(apply: Apply) -> Reports:
        reports = await read(apply)
        steps.append((len(apply.decisions), fleet.serving))
        return reports

    monkeypatch.setattr(coordinator, "_reports", noted)
    await coordinator.apply(version(2), ApplyOrder.ROLLING, max_unavailable=2)
    assert {decided for decided, _ in steps} == {0, 1, 2, 3}
    for decided, serving in steps:
        if decided == 0:
            assert serving == dict.fromkeys("abcd", 1)
        if decided == 1:
            assert (serving["c"], serving["d"]) == (1, 1)
    assert fleet.serving == dict.fromkeys("abcd", 2)


@pytest.mark.parametrize("kind", ApplyOrder)
async def test_a_rollback_is_for_all_and_rejects_by_content(fleet: Fleet, kind: ApplyOrder) -> None:
    await fleet.start("a", "b")
    coordinator = fleet.coordinator()
    for number in (2, 3):
        await coordinator.apply(version(number), kind)
    outcome = await coordinator.rollback(kind, reason="bad answers")
    assert (outcome.verdict, outcome.target) == (Verdict.COMMIT, version(2))
    assert fleet.serving == {"a": 2, "b": 2}
    await until(lambda: all(version(3).digest in host.rejected for host in fleet.hosts.values()))
    await fleet.start("late")
    await fleet.until_serving(a=2, b=2, late=2)
    await until(lambda: version(3).digest in fleet.hosts["late"].rejected)
    assert {host.rejected_reason for host in fleet.hosts.values()} == {"bad answers"}
    with pytest.raises(WeightSyncError, match="was rejected by a rollback") as caught:
        await coordinator.apply(replace(version(3), number=4), kind)
    assert caught.value.reason == Reason.VERSION_REJECTED
    assert (await coordinator.rollback(kind)).target == version(1)
    with pytest.raises(WeightSyncError, match="no version was decided before") as caught:
        await coordinator.rollback(kind)
    assert caught.value.reason == Reason.NO_ROLLBACK
    assert (await coordinator.apply(version(5), kind)).verdict is Verdict.COMMIT
    assert fleet.serving == {"a": 5, "b": 5, "late": 5}


async def test_a_coordinator_goes_on_when_its_register_does(fleet: Fleet) -> None:
    await fleet.start("a", "b")
    gate = fleet.hosts["a"].gate = asyncio.Event()
    link = CutRegister(fleet.folder / "register")
    applying = asyncio.create_task(
        Coordinator(link, "one", LIMITS).apply(version(2), ApplyOrder.BARRIER)
    )
    await until(lambda: fleet.members["a"].view.history.running)  # type: ignore[union-attr]  # it has started
    link.cut = True
    gate.set()
    await asyncio.sleep(0.3)
    link.cut = False
    assert (await applying).verdict is Verdict.COMMIT
    assert fleet.serving == {"a": 2, "b": 2}


async def test_what_no_fleet_may_go_to_is_refused(fleet: Fleet) -> None:
    coordinator = fleet.coordinator()
    with pytest.raises(WeightSyncError, match="none is in the fleet's register"):
        await coordinator.apply(version(2), ApplyOrder.BARRIER)
    await fleet.start("a")
    with pytest.raises(WeightSyncError, match="max_unavailable must be 1 or more, not 0"):
        await coordinator.apply(version(3), ApplyOrder.ROLLING, max_unavailable=0)
    await coordinator.apply(version(3), ApplyOrder.BARRIER)
    for target, reason in (
        (version(2), Reason.VERSION_BELOW_LIVE),
        (replace(version(3), digest="f" * 32), Reason.VERSION_CONFLICT),
    ):
        with pytest.raises(WeightSyncError) as caught:
            await coordinator.apply(target, ApplyOrder.BARRIER)
        assert caught.value.reason == reason
    assert fleet.serving == {"a": 3}


async def test_a_checkpoint_of_no_number_counts_as_older(fleet: Fleet) -> None:
    await fleet.start("a")
    local = version(1 << 52 | 7)
    await fleet.hosts["a"].commit(local)
    await until(lambda: fleet.members["a"].announced_live == local)
    fleet.hosts["a"].refuses = {"prepare"}
    assert (
        await fleet.coordinator().apply(version(2), ApplyOrder.ROLLING)
    ).verdict is Verdict.ABORT
    fleet.hosts["a"].refuses = set()
    assert (
        await fleet.coordinator().apply(version(2), ApplyOrder.ROLLING)
    ).verdict is Verdict.COMMIT
    assert (await fleet.coordinator().rollback(ApplyOrder.ROLLING)).target == local
    assert (
        await fleet.coordinator().apply(version(3), ApplyOrder.ROLLING)
    ).verdict is Verdict.COMMIT


async def test_one_apply_at_a_time(fleet: Fleet) -> None:
    await fleet.start("a", "b")
    first, gate = await fleet.begin(2, ApplyOrder.BARRIER, "a")
    with pytest.raises(WeightSyncError, match="apply 1 of the fleet runs") as caught:
        await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER)
    assert caught.value.reason == Reason.APPLY_BUSY
    gate.set()
    assert (await first).verdict is Verdict.COMMIT


async def test_the_first_rolling_apply_needs_a_way_back(fleet: Fleet) -> None:
    await fleet.start("a", "b")
    await fleet.hosts["a"].commit(version(7))
    await until(lambda: fleet.members["a"].announced_live == version(7))
    with pytest.raises(WeightSyncError, match="make the first apply a barrier"):
        await fleet.coordinator().apply(version(8), ApplyOrder.ROLLING)
    assert (
        await fleet.coordinator().apply(version(8), ApplyOrder.BARRIER)
    ).verdict is Verdict.COMMIT


async def test_a_barrier_is_not_committed_without_one_that_comes_in_that_moment(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.start("a", "b")

    async def late(*args: object, **given: object) -> Verdict | None:
        if "late" not in fleet.hosts:
            await fleet.start("late")
        return await decide(*args, **given)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr("weightsync_server.fleet.coordinator.decide", late)
    outcome = await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    assert (outcome.verdict, outcome.reason) == (
        Verdict.ABORT,
        "late appeared meanwhile; apply again",
    )
    await fleet.until_serving(a=1, b=1, late=1)
    assert (
        await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    ).verdict is Verdict.COMMIT
    assert fleet.serving == {"a": 2, "b": 2, "late": 2}


async def test_a_key_of_a_member_that_nobody_renews_is_waited_for_by_nobody(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    await fleet.register.create("members/zz", b"by hand")
    await fleet.start("a")
    for kind, number in ((ApplyOrder.BARRIER, 2), (ApplyOrder.ROLLING, 3)):
        outcome = await fleet.coordinator().apply(version(number), kind)
        assert (outcome.verdict, outcome.lagging) == (Verdict.COMMIT, ())
    assert "members/zz belongs to no running member" in caplog.text
    (a, zz) = (await FleetStatusReader(fleet.register).status()).members
    assert (a.name, zz.name) == ("a", "zz")
    assert zz.state.startswith("remove members/zz")
    needs = FleetNeeds("f")
    needs.read(fleet.register)
    assert await needs.contents() >= {version(3).digest}


async def test_old_applies_go_and_what_comes_back_of_them_counts_for_nothing(fleet: Fleet) -> None:
    await fleet.start("a")
    coordinator = fleet.coordinator()
    most = 0
    for number in range(2, 40):
        await coordinator.apply(version(number), ApplyOrder.BARRIER)
        most = max(most, len(await fleet.register.list("")))
    # Each apply has 7 keys; three times as many as are kept, and what is on leases.
    assert most < 7 * 3 * 8 + 10
    history = await HistoryReader(fleet.register).read()
    assert history.floor > 1
    # A coordinator that was frozen since then wakes up.
    plan = DecisionPlan(1, "n", ApplyOrder.BARRIER, version(99), None, (("a",),), 1)
    await fleet.register.create(plan_key(1), encode_plan(plan, 1))
    await fleet.register.create(decision_key(1, 1), encode_verdict(Verdict.COMMIT, "frozen"))
    assert await HistoryReader(fleet.register).read() == history
    assert (await coordinator.rollback(ApplyOrder.BARRIER)).target == version(38)


async def test_what_is_decided_against_goes_and_a_rollback_s_key_stays(fleet: Fleet) -> None:
    await fleet.start("a")
    for number in (2, 3):
        await fleet.coordinator().apply(version(number), ApplyOrder.BARRIER)
    back = await fleet.coordinator().rollback(ApplyOrder.BARRIER, key="once")
    assert (back.target, fleet.serving) == (version(2), {"a": 2})
    await fleet.coordinator().apply(version(4), ApplyOrder.BARRIER)
    fleet.hosts["a"].refuses = {"prepare"}
    most = 0
    for number in range(5, 40):
        # One coordinator each, as one call of the fleet each.
        outcome = await fleet.coordinator().apply(version(number), ApplyOrder.BARRIER)
        assert outcome.verdict is Verdict.ABORT
        most = max(most, len(await fleet.register.list("")))
    fleet.hosts["a"].refuses = set()
    # Of four commits and twice as many aborted ones as are kept, and what is on leases.
    assert most < 7 * 4 + 5 * 2 * 8 + 10
    for number in range(40, 60):
        await fleet.coordinator().apply(version(number), ApplyOrder.BARRIER)
    history = await HistoryReader(fleet.register).read()
    assert history.floor > back.number
    again = await fleet.coordinator().rollback(ApplyOrder.BARRIER, key="once")
    assert (again.number, again.verdict, again.target) == (back.number, back.verdict, version(2))
    assert fleet.serving == {"a": 59}


async def test_marks_that_say_nothing_any_more_go(fleet: Fleet) -> None:
    await fleet.start("a")
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    for _ in range(8):
        await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER, clears=True)
        await fleet.coordinator().rollback(ApplyOrder.BARRIER)
    for number in range(4, 40):
        await fleet.coordinator().apply(version(number), ApplyOrder.BARRIER)
    rejected = await fleet.register.list("rejected/")
    assert len(rejected) == 2, rejected
    with pytest.raises(WeightSyncError, match="was rejected by a rollback"):
        await fleet.coordinator().apply(replace(version(3), number=90), ApplyOrder.BARRIER)


async def test_a_rolling_apply_without_a_way_back_is_refused(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.start("a", "b")
    for host in fleet.hosts.values():
        # Its engines do not tell yet what they hold.
        monkeypatch.setattr(host, "live", lambda: None)
    await until(lambda: all(one.announced_live is None for one in fleet.members.values()))
    with pytest.raises(WeightSyncError, match="make the first apply a barrier") as caught:
        await fleet.coordinator().apply(version(2), ApplyOrder.ROLLING)
    assert caught.value.reason is Reason.NO_ROLLBACK
    assert await fleet.register.get(plan_key(1)) is None


def test_what_nobody_can_tell_is_no_way_back_over_damage() -> None:
    damaged = History(
        unreadable="damaged", unreadable_number=1, unreadable_commits=True, unreadable_decided=True
    )
    with pytest.raises(WeightSyncError, match="or do not report one"):
        previous_of(damaged, {"a": None, "b": None}, ApplyOrder.BARRIER)
