"""An apply that runs is ended by a call, unless it is decided already."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.support.fleet_hosts import version
from tests.support.fleet_tasks import LIMITS, in_format, until
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.decide import ApplyOrder, DecisionPlan, Verdict
from weightsync_server.fleet import coordinator as coordinators
from weightsync_server.fleet.fleet_records import (
    FORMAT,
    decide,
    decision_key,
    encode_plan,
    encode_roster,
    encode_verdict,
    plan_key,
    roster_key,
)

if TYPE_CHECKING:
    from tests.support.fleet_tasks import Fleet

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize("kind", ApplyOrder)
async def test_an_apply_that_nobody_gets_ready_for_is_ended(fleet: Fleet, kind: ApplyOrder) -> None:
    await fleet.start("a", "b")
    await fleet.coordinator().apply(version(2), kind)
    # In a rolling apply "a" has gone to it by then, and goes back.
    applying, gate = await fleet.begin(3, kind, "b")
    if kind is ApplyOrder.ROLLING:
        await fleet.until_serving(a=3, b=2)
    with pytest.raises(WeightSyncError, match="end it with `weightsync fleet abort`") as caught:
        await fleet.coordinator().rollback(kind)
    done = int(kind is ApplyOrder.ROLLING)
    far = f"(to version 3, {done} of {done * 2 + 1} decisions)"
    assert f"apply 2 of the fleet runs {far}; wait for it" in caught.value.message
    ended = await fleet.coordinator().abort("it was the wrong one")
    assert ended is not None
    assert (ended.number, ended.verdict) == (2, Verdict.ABORT)
    assert ended.reason == "it was ended by a call: it was the wrong one"
    outcome = await applying
    assert (outcome.verdict, outcome.reason) == (Verdict.ABORT, ended.reason)
    await fleet.until_serving(a=2, b=2)
    gate.set()
    assert (await fleet.coordinator().rollback(kind)).target == version(1)
    await fleet.until_serving(a=1, b=1)


async def test_nothing_that_runs_is_nothing_to_end(fleet: Fleet) -> None:
    await fleet.start("a")
    assert await fleet.coordinator().abort() is None
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    assert await fleet.coordinator().abort() is None
    assert fleet.serving == {"a": 2}


async def test_what_was_decided_first_stays_decided(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.start("a", "b")
    asked = asyncio.Event()

    async def comes_second(*given: object, **more: object) -> Verdict | None:
        if given[3] is Verdict.ABORT:
            asked.set()
            # The coordinator of the apply decides meanwhile.
            await until(lambda: fleet.serving == {"a": 2, "b": 2})
        return await decide(*given, **more)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(coordinators, "decide", comes_second)
    applying, gate = await fleet.begin(2, ApplyOrder.BARRIER, "b")
    ending = asyncio.create_task(fleet.coordinator().abort())
    await asked.wait()
    gate.set()
    ended = await ending
    assert ended is not None
    assert (ended.number, ended.verdict, ended.reason) == (1, Verdict.COMMIT, "")
    assert (await applying).verdict is Verdict.COMMIT
    assert fleet.serving == {"a": 2, "b": 2}


async def test_a_wave_that_was_let_go_first_goes_back(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.start("a", "b")
    steps: list[int] = []

    async def overtaken_once(*given: object, **more: object) -> Verdict | None:
        if given[3] is Verdict.ABORT:
            steps.append(int(given[2]))  # type: ignore[call-overload]  # the number of a decision
            if len(steps) == 1:
                fleet.hosts["a"].gate = None
                await until(lambda: fleet.hosts["a"].serves == 2)
        return await decide(*given, **more)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(coordinators, "decide", overtaken_once)
    gate = fleet.hosts["a"].gate = asyncio.Event()
    applying, _ = await fleet.begin(2, ApplyOrder.ROLLING, "b")
    ending = asyncio.create_task(fleet.coordinator().abort())
    await until(lambda: steps)
    gate.set()
    ended = await ending
    assert ended is not None
    assert (ended.verdict, steps) == (Verdict.ABORT, [1, 2])
    assert (await applying).verdict is Verdict.ABORT
    await fleet.until_serving(a=1, b=1)


@pytest.mark.parametrize("damaged", [False, True], ids=["newer", "damaged"])
async def test_one_that_cannot_be_read_is_ended_by_its_number(fleet: Fleet, damaged: bool) -> None:
    await fleet.start("a")
    plan = DecisionPlan(1, "n", ApplyOrder.BARRIER, version(2), version(1), (("a",),), 1)
    (part,) = encode_roster(plan.waves)
    await fleet.register.create(roster_key(plan.nonce, 0), part)
    body = encode_plan(plan, 1)
    body = body.replace(b'"nonce"', b'"other"') if damaged else in_format(FORMAT + 1, body)
    await fleet.register.create(plan_key(1), body)
    ended = await fleet.coordinator(LIMITS).abort()
    assert ended is not None
    assert (ended.number, ended.verdict) == (1, Verdict.ABORT)
    assert (
        await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER)
    ).verdict is Verdict.COMMIT
    assert fleet.serving == {"a": 3}


async def test_one_that_is_committed_and_cannot_be_read_is_not_ended(fleet: Fleet) -> None:
    plan = DecisionPlan(1, "n", ApplyOrder.BARRIER, version(2), version(1), (("a",),), 1)
    await fleet.register.create(plan_key(1), in_format(FORMAT + 1, encode_plan(plan, 1)))
    await fleet.register.create(decision_key(1, 1), encode_verdict(Verdict.COMMIT, "other"))
    with pytest.raises(WeightSyncError, match="this release knows 1 to") as caught:
        await fleet.coordinator(LIMITS).abort()
    assert caught.value.reason is Reason.NOT_SUPPORTED


async def test_who_comes_second_with_a_plan_leaves_nothing(fleet: Fleet) -> None:
    first, second = (
        DecisionPlan(1, nonce, ApplyOrder.BARRIER, version(2), version(1), (("a",),), 1)
        for nonce in ("n1", "n2")
    )
    await fleet.coordinator()._write(first)
    before = await fleet.register.list("")
    with pytest.raises(WeightSyncError, match="apply 1 of the fleet runs"):
        await fleet.coordinator()._write(second)
    assert await fleet.register.list("") == before
