"""A register that was put back from an older copy: nobody follows it, and it is told."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.support.fleet_hosts import version
from tests.support.fleet_tasks import LIMITS, until
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.decide import ApplyOrder, ApplyPhase, Verdict
from weightsync_server.fleet.coordinator import Coordinator
from weightsync_server.fleet.fleet_history import HistoryReader, Seen
from weightsync_server.fleet.fleet_records import (
    MEMBERS,
    apply_prefix,
    decision_key,
    decode_refusal,
    plan_key,
    reports_prefix,
)
from weightsync_server.fleet.member_journal import MemberJournal
from weightsync_server.fleet.member_steps import HostMode
from weightsync_server.fleet_host.fleet_status import FleetStatusReader
from weightsync_server.store.store_records import write_document

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.fleet_tasks import Fleet

pytestmark = pytest.mark.timeout(30)


def copied(fleet: Fleet) -> dict[str, bytes]:
    records = fleet.folder / "register" / "records"
    return {one.name: one.read_bytes() for one in records.iterdir()}


def put_back(fleet: Fleet, copy: dict[str, bytes]) -> None:
    records = fleet.folder / "register" / "records"
    for one in records.iterdir():
        one.unlink()
    for name, value in copy.items():
        (records / name).write_bytes(value)


def lose(fleet: Fleet, key: str) -> None:
    (fleet.folder / "register" / "records" / key.replace("/", "+")).unlink()


def knowing(fleet: Fleet, name: str) -> Coordinator:
    """Return what coordinates for a member, and knows what that has read."""
    return Coordinator(fleet.register, name, LIMITS, fleet.members[name]._journal)


@pytest.mark.parametrize("order", ApplyOrder)
@pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted"])
async def test_a_commit_that_is_gone_is_not_decided_anew(
    fleet: Fleet, order: ApplyOrder, restarted: bool
) -> None:
    await fleet.start("a", "b")
    await fleet.coordinator().apply(version(2), order)
    # Also durably, a moment later.
    journals = [one._journal for one in fleet.members.values()]
    await until(lambda: all(MemberJournal(one._path).seen.verdict for one in journals))
    if restarted:
        await fleet.kill("a")
        await fleet.kill("b")
    # As a copy made inside the apply: its coordinator is gone as well.
    last = max(await fleet.register.list(f"{apply_prefix(1)}decisions/"))
    lose(fleet, last)
    if restarted:
        for name in ("a", "b"):
            await until(lambda name=name: _is_gone(fleet, name))
        starting = asyncio.create_task(fleet.start("a", "b"))
        await until(lambda: "b" in fleet.members)
    for member in fleet.members.values():
        await until(
            lambda member=member: "COMMIT was decided in apply 1" in member._journal.refusal
        )
    await asyncio.sleep(3 * LIMITS.grace_s)
    assert await fleet.register.get(last) is None
    assert {fleet.hosts[name].live().number for name in "ab"} == {2}  # type: ignore[union-attr]  # it has one
    if restarted:
        starting.cancel()
    else:
        assert fleet.serving == {"a": 2, "b": 2}


def _is_gone(fleet: Fleet, name: str) -> bool:
    return fleet.register._members.read(f"members+{name}") is None


async def test_the_way_out_that_is_named_brings_back_what_was_served(fleet: Fleet) -> None:
    await fleet.start("a", "b")
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    copy = copied(fleet)
    await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER)
    put_back(fleet, copy)
    await until(lambda: all(one._journal.refusal for one in fleet.members.values()))
    assert "apply again the version that they serve now" in fleet.members["a"]._journal.refusal
    for name in "ab":
        await fleet.kill(name)
        (fleet.folder / name / "journal.json").unlink()
        await until(lambda name=name: fleet.register._members.read(f"members+{name}") is None)
    await fleet.start("a", "b")
    # The register knows of no more.
    await fleet.until_serving(a=2, b=2)
    outcome = await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER)
    assert (outcome.verdict, fleet.serving) == (Verdict.COMMIT, {"a": 3, "b": 3})


async def test_another_plan_of_a_number_that_was_read_is_not_followed(fleet: Fleet) -> None:
    await fleet.start("a")
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    copy = copied(fleet)
    await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER)
    put_back(fleet, copy)
    await until(
        lambda: "its newest apply is 1, but 2 was read" in fleet.members["a"]._journal.refusal
    )
    # One that knows of nothing plans until the number is the same.
    await fleet.kill("a")
    await fleet.start("b")
    await fleet.coordinator().apply(version(4), ApplyOrder.BARRIER)
    starting = asyncio.create_task(fleet.start("a"))
    await until(lambda: "a" in fleet.members)
    await until(lambda: "apply 2 differs from the one" in fleet.members["a"]._journal.refusal)
    starting.cancel()
    assert fleet.hosts["a"].live() == version(3)


async def test_nothing_is_planned_in_a_register_that_a_member_refuses(fleet: Fleet) -> None:
    await fleet.start("a", "b")
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    copy = copied(fleet)
    await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER)
    newest = copied(fleet)
    put_back(fleet, copy)
    # Its member need not have read it yet.
    own = knowing(fleet, "a")
    for call in (own.apply(version(4), ApplyOrder.BARRIER), own.rollback(ApplyOrder.ROLLING)):
        with pytest.raises(
            WeightSyncError, match="it was emptied or restored from an older copy"
        ) as caught:
            await call
        assert caught.value.reason is Reason.DATA_CORRUPT
        assert "journal.json" in caught.value.message
    with pytest.raises(WeightSyncError, match="it was emptied or restored from an older copy"):
        await own.abort()

    async def refusals() -> set[str]:
        alive, _ = await fleet.register.members(MEMBERS)
        return {decode_refusal(value)[:42] for value in alive.values()}

    while await refusals() != {"restore the newest state of the register: "}:  # noqa: ASYNC110 - a register is asked
        await asyncio.sleep(0.01)
    # Another host knows nothing, and believes them.
    with pytest.raises(WeightSyncError, match=r"planned or ended, because a takes no part"):
        await fleet.coordinator().apply(version(4), ApplyOrder.ROLLING)
    assert await fleet.register.get(plan_key(2)) is None
    listed = (await FleetStatusReader(fleet.register).status()).members
    assert all("does not follow it" in one.reason for one in listed)
    # Nor does one that begins now serve what the fleet has left.
    starting = asyncio.create_task(fleet.start("c"))
    await until(lambda: "c" in fleet.members)
    await until(lambda: "because a has read a newer state" in fleet.members["c"].view.why)
    assert fleet.members["c"].view.history is None
    fleet.members["c"]._state = replace(fleet.members["c"]._state, mode=HostMode.FENCED)
    assert "because a has read a newer state" in fleet.members["c"].why
    assert fleet.serving == {"a": 3, "b": 3, "c": 1}
    # The newest state of the register brings all back.
    put_back(fleet, newest)
    await fleet.until_serving(a=3, b=3, c=3)
    await starting


async def test_what_was_said_of_another_plan_of_that_number_does_not_count(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.start("a")
    monkeypatch.setattr(fleet.members["a"]._journal, "check", lambda _: None)
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    view = fleet.members["a"].view
    await until(lambda: (1, ApplyPhase.DONE) in view.said)
    with monkeypatch.context() as held:
        idle = asyncio.Event()

        async def read_nothing() -> float:
            idle.set()
            return await asyncio.sleep(0.01, 0.01)

        # It reads neither in between, once a reading that is under way has ended.
        held.setattr(view, "_read_once", read_nothing)
        view.look()
        await idle.wait()
        put_back(fleet, {})
        limits = replace(LIMITS, prepare_s=3.0)
        applying = asyncio.create_task(
            fleet.coordinator(limits).apply(version(3), ApplyOrder.BARRIER)
        )
        while await fleet.register.get(plan_key(1)) is None:  # noqa: ASYNC110 - a register is asked
            await asyncio.sleep(0.01)
    assert (await applying).reason == ""
    await fleet.until_serving(a=3)


async def test_a_stray_plan_that_is_removed_is_forgotten(fleet: Fleet) -> None:
    await fleet.start("a")
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    await fleet.register.create(plan_key(2), b"junk")
    # Not beside what it says of that plan.
    while not await fleet.register.list(reports_prefix(2)):  # noqa: ASYNC110 - a register is asked
        await asyncio.sleep(0.01)
    lose(fleet, plan_key(2))
    for report in await fleet.register.list(reports_prefix(2)):
        lose(fleet, report)
    await until(lambda: fleet.members["a"].view.number == 1)
    assert (await knowing(fleet, "a").apply(version(3), ApplyOrder.BARRIER)).number == 2
    await fleet.until_serving(a=3)
    assert fleet.members["a"]._journal.seen.number == 2


async def test_a_stray_plan_that_was_ended_is_known(fleet: Fleet) -> None:
    await fleet.start("a")
    await fleet.register.create(plan_key(1), b"junk")
    await fleet.coordinator().abort()
    await until(lambda: fleet.members["a"]._journal.seen == Seen(1))
    assert (await knowing(fleet, "a").apply(version(3), ApplyOrder.BARRIER)).number == 2


async def test_a_plan_that_is_damaged_later_stays_known(fleet: Fleet, tmp_path: Path) -> None:
    await fleet.start("a")
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    seen = (await HistoryReader(fleet.register).read()).seen
    journal = MemberJournal(tmp_path / "one.json")
    await journal.see(seen._replace(verdict=""))
    await journal.see(seen)
    assert MemberJournal(tmp_path / "one.json").seen.verdict == ""
    await journal.keep()
    await journal.see(Seen(seen.number))
    assert MemberJournal(tmp_path / "one.json").seen == seen._replace(decisions=())
    lose(fleet, decision_key(1, 1))
    with pytest.raises(WeightSyncError, match="COMMIT was decided in apply 1"):
        journal.check(await HistoryReader(fleet.register).read())


def test_the_journal_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    path = tmp_path / "journal.json"
    write_document(path, {"stopped_in": 3, "seen": 7})
    journal = MemberJournal(path)
    assert (journal.stopped_in, journal.seen) == (3, Seen(7))


async def test_a_cache_mixes_no_two_registers(fleet: Fleet) -> None:
    await fleet.start("a", "b")
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    copy = copied(fleet)
    for number in (3, 4):
        await fleet.coordinator().apply(version(number), ApplyOrder.BARRIER)
    reader = HistoryReader(fleet.register)
    await reader.read()
    put_back(fleet, copy)
    # All that refuse are started anew without their journals, as the docs say.
    for name in "ab":
        await fleet.kill(name)
        (fleet.folder / name / "journal.json").unlink(missing_ok=True)
        await until(lambda name=name: fleet.register._members.read(f"members+{name}") is None)
    await fleet.start("a", "b")
    await fleet.until_serving(a=2, b=2)
    for number in (5, 6):
        await fleet.coordinator().apply(version(number), ApplyOrder.BARRIER)
    cached = [one.plan.target.number for one in (await reader.read()).commits]
    anew = [one.plan.target.number for one in (await HistoryReader(fleet.register).read()).commits]
    assert cached == anew
