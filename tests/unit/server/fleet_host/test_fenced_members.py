"""A member that serves nothing says why, and is counted where it is no part of an apply."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.support.fleet_hosts import version
from tests.support.fleet_tasks import LIMITS, Fleet
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.decide import ApplyOrder
from weightsync_server.fleet.fleet_records import decode_member, encode_member
from weightsync_server.fleet_host.fleet_status import FleetStatusReader, correct_own, list_member

if TYPE_CHECKING:
    from weightsync.v1 import weightsync_pb2 as pb


async def shown(fleet: Fleet, name: str, reason: str) -> pb.GetFleetStatusResponse:
    """Return what status says as soon as a member gives a reason."""
    reader = FleetStatusReader(fleet.register)
    while True:
        status = await reader.status()
        if any(one.name == name and reason in one.reason for one in status.members):
            return status
        await asyncio.sleep(0.05)


async def test_one_that_cannot_commit_says_so_until_it_serves(fleet: Fleet) -> None:
    await fleet.start("a", "b")
    fleet.hosts["b"].refuses = {"commit"}
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    status = await shown(fleet, "b", "commit is refused")
    assert {one.name: one.state for one in status.members} == {"a": "serving", "b": "fenced"}
    assert [one.reason for one in status.members if one.name == "a"] == [""]
    fleet.hosts["b"].refuses = set()
    await fleet.until_serving(a=2, b=2)
    status = await shown(fleet, "b", "")
    while any(one.state == "fenced" for one in status.members):
        status = await shown(fleet, "b", "")
    assert not any(one.reason for one in status.members)


async def test_one_that_comes_and_cannot_follow_is_counted(fleet: Fleet) -> None:
    await fleet.start("a")
    outcome = await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    (fleet.folder / "late").mkdir()
    starting = asyncio.create_task(fleet.start("late"))
    while "late" not in fleet.hosts:  # noqa: ASYNC110 - it is made by a task
        await asyncio.sleep(0)
    fleet.hosts["late"].refuses = {"prepare"}
    await starting
    status = await shown(fleet, "late", "prepare is refused")
    assert status.newest.fenced_others == ["late"]
    report = await FleetStatusReader(fleet.register).report(outcome.number)
    assert report == status.newest


async def test_one_that_cannot_write_tells_of_itself_what_is_so(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.start("a", limits=replace(LIMITS, max_age_s=0.5))
    member = fleet.members["a"]

    async def full(*_: object) -> None:
        raise WeightSyncError(Reason.DISK_EXHAUSTED, "no space")

    monkeypatch.setattr(fleet.links["a"], "member", full)
    fleet.links["a"].cut = True
    await fleet.until_serving(a=0)
    status = await FleetStatusReader(fleet.register).status()
    assert [one.state for one in status.members] == ["serving"]
    correct_own(status, member)
    (one,) = status.members
    assert (one.state, one.reason) == ("fenced", member.why)
    assert "max_age_s" in one.reason


def test_a_reason_is_cut_between_two_letters() -> None:
    value = encode_member(None, "fenced", "a:1", "boot", 150 * "é")
    assert list_member("a", value).reason == 100 * "é"
    assert decode_member(value) == (None, "fenced", "a:1")
    assert list_member("a", encode_member(None, "fenced", "a:1", "boot")).reason == ""
