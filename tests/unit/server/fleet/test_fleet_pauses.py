"""How members pause, where the caller of a fleet's apply says so."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.support.fleet_hosts import FileHost, version
from tests.support.fleet_tasks import LIMITS, until
from weightsync.engine import BETWEEN_STEPS, CacheUse, PauseSpec
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.decide import ApplyOrder, Verdict
from weightsync_server.fleet.fleet_records import decision_key, encode_verdict, plan_key
from weightsync_server.fleet.member_steps import Prepare

if TYPE_CHECKING:
    from tests.support.fleet_tasks import Fleet
    from weightsync_server.decide import FleetVersion

pytestmark = pytest.mark.timeout(30)

_ABORT = PauseSpec("abort", cache=CacheUse.KEEP)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, PauseSpec | None]]:
    """What hosts are asked to prepare: name, number, pause."""
    found: list[tuple[str, int, PauseSpec | None]] = []
    prepare = FileHost.prepare

    async def note(self: FileHost, target: FleetVersion, pause: PauseSpec | None = None) -> None:
        found.append((self.name, target.number, pause))
        await prepare(self, target, pause)

    monkeypatch.setattr(FileHost, "prepare", note)
    return found


@pytest.mark.parametrize("kind", ApplyOrder)
async def test_the_plan_carries_the_pause_to_every_member(
    fleet: Fleet, asked: list[tuple[str, int, PauseSpec | None]], kind: ApplyOrder
) -> None:
    await fleet.start("a", "b")
    assert (await fleet.coordinator().apply(version(2), kind, pause=_ABORT)).verdict == "COMMIT"
    assert sorted(asked) == [("a", 2, _ABORT), ("b", 2, _ABORT)]
    assert fleet.serving == {"a": 2, "b": 2}
    asked.clear()
    await fleet.coordinator().rollback(kind, pause=_ABORT)
    assert sorted(asked) == [("a", 1, _ABORT), ("b", 1, _ABORT)]


async def test_one_that_comes_late_pauses_as_where_nobody_chooses(
    fleet: Fleet, asked: list[tuple[str, int, PauseSpec | None]]
) -> None:
    await fleet.start("a", "b")
    await fleet.kill("b")
    await until(lambda: fleet.register._members.read("members+b") is None)
    await fleet.coordinator().apply(version(2), ApplyOrder.ROLLING, pause=_ABORT)
    await fleet.start("b")
    await fleet.until_serving(a=2, b=2)
    assert [one for one in asked if one[0] == "b"] == [("b", 2, None)]


async def test_what_is_prepared_for_one_pause_is_not_used_for_another(
    fleet: Fleet, asked: list[tuple[str, int, PauseSpec | None]]
) -> None:
    await fleet.start("a", "b")
    fleet.hosts["b"].gate = gate = asyncio.Event()
    first = asyncio.create_task(fleet.coordinator().apply(version(2), ApplyOrder.BARRIER))
    await until(lambda: ("a", 2, None) in asked)
    # One decision and the next plan, before `a` looks again.
    fleet.links["a"].cut = True
    await fleet.register.create(decision_key(1, 1), encode_verdict(Verdict.ABORT, "other"))
    gate.set()
    coordinator = fleet.coordinator()
    second = asyncio.create_task(coordinator.apply(version(2), ApplyOrder.BARRIER, pause=_ABORT))
    while await fleet.register.get(plan_key(2)) is None:  # noqa: ASYNC110 - a register is asked
        await asyncio.sleep(0.01)
    assert fleet.members["a"].state.prepared == Prepare(version(2))
    fleet.links["a"].cut = False
    assert (await second).verdict is Verdict.COMMIT
    assert (await first).verdict is Verdict.ABORT
    assert ("a", 2, _ABORT) in asked


async def test_a_pause_that_a_member_cannot_make_is_refused_before_anybody_pauses(
    fleet: Fleet,
) -> None:
    await fleet.start("a", "b")
    fleet.hosts["b"].refuses.add(BETWEEN_STEPS)
    pause = PauseSpec(BETWEEN_STEPS, cache=CacheUse.KEEP)
    outcome = await fleet.coordinator().apply(version(2), ApplyOrder.ROLLING, 2, pause=pause)
    assert outcome.verdict is Verdict.ABORT
    assert outcome.reason == "b is not prepared: no engine here can between_steps"
    await until(lambda: fleet.members["a"].state.prepared is None)
    assert {what for host in fleet.hosts.values() for what, _ in host.log} <= {"begin", "resume"}
    assert fleet.serving == {"a": 1, "b": 1}


@pytest.mark.parametrize(
    ("pause", "sentence"),
    [
        (PauseSpec(BETWEEN_STEPS, cache=CacheUse.KEEP), "do not pause for one decision"),
        (PauseSpec("wait"), r"cannot wait 30 s .* up to 7\.5 s, use order ROLLING"),
    ],
)
async def test_a_barrier_in_which_members_would_not_stand_still_is_refused(
    fleet: Fleet, pause: PauseSpec, sentence: str
) -> None:
    await fleet.start("a")
    limits = replace(LIMITS, undecided_s=30.0)
    for call in (
        fleet.coordinator(limits).apply(version(2), ApplyOrder.BARRIER, pause=pause),
        fleet.coordinator(limits).rollback(ApplyOrder.BARRIER, pause=pause),
    ):
        with pytest.raises(WeightSyncError, match=sentence) as caught:
            await call
        assert caught.value.reason == Reason.REQUEST_INVALID
    assert await fleet.register.list("applies/") == {}
    short = replace(pause, mode="wait", wait_timeout_s=7.0)
    outcome = await fleet.coordinator(limits).apply(version(2), ApplyOrder.BARRIER, pause=short)
    assert outcome.verdict is Verdict.COMMIT
