"""A member that has read a newer state refuses what the register says, and others heed it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.support.fleet_folder import (
    at_commit,
    put_back,
    put_back_past_a_commit,
    records,
    told,
)
from tests.support.fleet_hosts import version
from tests.support.fleet_tasks import LIMITS, until
from weightsync.errors import WeightSyncError
from weightsync_server.decide import ApplyOrder, Verdict
from weightsync_server.fleet.fleet_history import Seen
from weightsync_server.fleet.fleet_records import decide, decision_key
from weightsync_server.fleet.member_journal import MemberJournal
from weightsync_server.fleet.member_steps import HostMode

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.fleet_tasks import Fleet

pytestmark = pytest.mark.timeout(30)


async def test_an_abort_by_a_call_heeds_who_has_read_more(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put_back_past_a_commit(fleet, monkeypatch)
    with pytest.raises(WeightSyncError, match="a takes no part"):
        await fleet.coordinator().abort()
    assert await fleet.register.get(decision_key(2, 1)) is None


async def test_a_repeated_call_heeds_who_has_read_more(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.start("a", "b")
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    copy: dict[Path, bytes] = {}
    at_commit(monkeypatch, lambda: copy.update(records(fleet)))
    outcome = await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER, key="k")
    assert outcome.verdict is Verdict.COMMIT
    await fleet.until_serving(a=3, b=3)
    put_back(fleet, copy)
    for name in "ab":
        await told(fleet, name)
    # A host that knows nothing is asked; it is a stranger to that barrier.
    starting = asyncio.create_task(fleet.start("c"))
    await until(
        lambda: "c" in fleet.members and "has read a newer state" in fleet.members["c"].view.why
    )
    with pytest.raises(WeightSyncError, match="a takes no part"):
        await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER, key="k")
    starting.cancel()
    assert await fleet.register.get(decision_key(2, 1)) is None


@pytest.mark.parametrize("call", ["abort", "repeated", "of an earlier release"])
async def test_nobody_goes_back_by_an_abort_in_a_register_that_was_put_back(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    limits = replace(LIMITS, undecided_s=20.0, settle_s=0.5)
    await fleet.start("a", "b", limits=limits)
    await fleet.coordinator(limits).apply(version(2), ApplyOrder.BARRIER)
    copy: dict[Path, bytes] = {}
    view = fleet.members["b"].view
    reading = view._read_once

    async def held() -> float:
        return await asyncio.sleep(0.01, 0.01)

    def cut() -> None:
        copy.update(records(fleet))
        view._read_once = held  # type: ignore[method-assign]

    at_commit(monkeypatch, cut)
    outcome = await fleet.coordinator(limits).apply(version(3), ApplyOrder.BARRIER, key="k")
    assert (outcome.verdict, fleet.serving) == (Verdict.COMMIT, {"a": 3, "b": 0})
    put_back(fleet, copy)
    await until(lambda: fleet.members["a"]._journal.refusal)
    await told(fleet, "a")
    view._read_once = reading  # type: ignore[method-assign]
    at = view.read_at
    await until(lambda: view.read_at > at)
    if call == "of an earlier release":
        # Which heeds nobody: whoever stands still does.
        plan = view.history.running.plan  # type: ignore[union-attr]  # it runs
        given = (plan.number, 1, Verdict.ABORT, "x", "it was ended by a call", plan.nonce)
        assert await decide(fleet.register, *given) is Verdict.ABORT
        await until(lambda: "a has read a newer state" in view.why)
    elif call == "abort":
        with pytest.raises(WeightSyncError, match="a takes no part"):
            await fleet.coordinator(limits).abort()
    else:
        # Another one has come, for which a barrier is called off.
        await fleet.register.member("members/z", b"", 5)
        with pytest.raises(WeightSyncError, match="a takes no part"):
            await fleet.coordinator(limits).apply(version(3), ApplyOrder.BARRIER, key="k")
    await asyncio.sleep(0.5)
    assert fleet.serving == {"a": 3, "b": 0}


async def test_who_is_fenced_for_another_one_refuses_names_that_one(fleet: Fleet) -> None:
    limits = replace(LIMITS, max_age_s=0.6)
    await fleet.start("a", "b", limits=limits)
    await fleet.coordinator(limits).apply(version(2), ApplyOrder.BARRIER)
    (fleet.folder / "c").mkdir()
    await MemberJournal(fleet.folder / "c" / "journal.json").see(Seen(40, "n", "COMMIT"))
    starting = asyncio.create_task(fleet.start("c", limits=limits))
    await until(lambda: "c" in fleet.members and fleet.members["c"]._journal.refusal)
    member = fleet.members["a"]
    await until(
        lambda: member.state.mode is HostMode.FENCED and "c has read a newer state" in member.why
    )
    starting.cancel()


async def test_who_stands_still_and_is_fenced_names_who_refuses(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put_back_past_a_commit(fleet, monkeypatch)
    fleet.thaw("b")
    member = fleet.members["b"]
    await until(lambda: "because a has read a newer state" in member.view.why)
    await until(
        lambda: member.state.mode is HostMode.FENCED and "a has read a newer state" in member.why
    )


async def test_who_is_displaced_learns_it_beside_a_refusal(fleet: Fleet) -> None:
    await fleet.start("a")
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    (fleet.folder / "c").mkdir()
    await MemberJournal(fleet.folder / "c" / "journal.json").see(Seen(40, "n", "COMMIT"))
    starting = asyncio.create_task(fleet.start("c"))
    await until(lambda: "c" in fleet.members and fleet.members["c"]._journal.refusal)
    # It says so, and has nothing new to say from then on.
    await until(lambda: b"c has read a newer state" in fleet.members["a"]._announced)
    other = await fleet.register.member("members/a", b"", 5)
    await until(lambda: fleet.serving["a"] == 0)
    starting.cancel()
    await other.close()
