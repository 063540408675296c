"""What a fleet serves, goes to and may go back to is not collected by whoever has the store."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from tests.support.fleet_tasks import Fleet, in_format
from tests.unit.server.deltas.pushing import until
from tests.unit.server.world import World, content, real_fetchers, simple, world
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.catalog.garbage_collector import Retention
from weightsync_server.decide import ApplyOrder, FleetVersion
from weightsync_server.fleet.fleet_records import APPLIES, FORMAT, encode_member, member_key
from weightsync_server.fleet_host.fleet_service import FleetNeeds

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from tests.support.object_servers import ObjectServer


def version(number: int) -> FleetVersion:
    return FleetVersion(number, content(simple(number)))


def member(number: int) -> bytes:
    return encode_member(version(number), "serving", "c:1")


def kept(here: World) -> list[int]:
    return sorted(record.version for record in here.model.table.list())


async def push(here: World, *numbers: int) -> None:
    """Push versions, and return when nothing is collected any more."""
    for number in numbers:
        await here.push(simple(number), number)
        await here.model.collector.close()


@contextlib.asynccontextmanager
async def collecting(
    fleet: Fleet, folder: Path, store: str = "", needs: FleetNeeds | None = None
) -> AsyncIterator[World]:
    """A server of the fleet that keeps two versions, the newest of them in memory."""
    retention = Retention(versions=2)
    if needs is None:
        needs = FleetNeeds("f")
        needs.read(fleet.register)
    async with (
        real_fetchers() as fetchers,
        world(
            folder,
            store=store,
            identity="o",
            slots=1,
            retention=retention,
            fetchers=fetchers,
            needed_elsewhere=needs.contents,
        ) as here,
    ):
        yield here


@pytest.fixture(params=["folder", "bucket"])
def store(
    request: pytest.FixtureRequest,
    s3: ObjectServer,
    reached: Callable[..., None],
    tmp_path: Path,
) -> str:
    if request.param == "folder":
        return (tmp_path / "shared").as_uri()
    reached(s3)
    return f"{s3.url}/{tmp_path.name}"


async def test_what_members_serve_and_would_go_back_to_stays(
    fleet: Fleet, tmp_path: Path, store: str
) -> None:
    await fleet.start("a", "b")
    async with collecting(fleet, tmp_path / "o", store) as here:
        await push(here, 1, 2)
        for number in (1, 2):
            await fleet.coordinator().apply(version(number), ApplyOrder.BARRIER)
        await push(here, 3, 4, 5)
        assert kept(here) == [1, 2, 5]
        # One that is behind, or ahead.
        behind = await fleet.register.member(member_key("c"), member(5), 10)
        await push(here, 6, 7)
        assert kept(here) == [1, 2, 5, 7]
        await behind.close()
        await fleet.coordinator().apply(version(7), ApplyOrder.ROLLING)
        await push(here, 8)
        assert kept(here) == [2, 7, 8]
        # What is rejected is no way back.
        await fleet.coordinator().rollback(ApplyOrder.BARRIER)
        await push(here, 9)
        assert kept(here) == [2, 7, 9]


async def test_what_a_plan_that_runs_names_stays(fleet: Fleet, tmp_path: Path) -> None:
    await fleet.start("a")
    async with collecting(fleet, tmp_path / "o") as here:
        await push(here, 1, 2)
        fleet.hosts["a"].gate = asyncio.Event()
        applying = asyncio.create_task(fleet.coordinator().apply(version(1), ApplyOrder.BARRIER))
        while not await fleet.register.list(APPLIES):  # noqa: ASYNC110 - a register is asked
            await asyncio.sleep(0.01)
        await push(here, 3, 4)
        assert kept(here) == [1, 4]
        fleet.hosts["a"].gate.set()
        await applying
        assert fleet.serving == {"a": 1}


async def test_nothing_is_collected_while_the_register_cannot_be_read(
    fleet: Fleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with collecting(fleet, tmp_path / "o") as here:
        found = await fleet.register.member(member_key("c"), member(1), 10)
        await push(here, 1, 2)
        folder, away = fleet.folder / "register", tmp_path / "away"
        await asyncio.to_thread(folder.rename, away)
        await push(here, 3, 4, 5)
        assert kept(here) == [1, 2, 3, 4, 5]
        assert caplog.text.count("no version is deleted for now") == 1
        await asyncio.to_thread(away.rename, folder)
        await found.close()
        # Nor for somebody whose record is of another release.
        newer = await fleet.register.member(member_key("d"), in_format(FORMAT + 1, member(2)), 10)
        await push(here, 6)
        assert kept(here) == [1, 2, 3, 4, 5, 6]
        await newer.close()
        await push(here, 7)
        assert kept(here) == [6, 7]


async def test_a_pin_of_another_server_is_seen_before_it_counts(
    fleet: Fleet, tmp_path: Path, store: str
) -> None:
    async with collecting(fleet, tmp_path / "o", store) as here, real_fetchers() as fetchers:
        await push(here, 1, 2)
        async with world(tmp_path / "p", store=store, identity="p", fetchers=fetchers) as other:
            await other.model.serving.pin(1, pinned=True)
        await push(here, 3, 4)
        assert kept(here) == [1, 4]
        await until(lambda: here.model.table.get(1).pinned)


async def test_what_members_need_is_deleted_by_force_alone(fleet: Fleet, tmp_path: Path) -> None:
    await fleet.start("a")
    async with collecting(fleet, tmp_path / "o") as here:
        await push(here, 1, 2)
        await fleet.coordinator().apply(version(1), ApplyOrder.BARRIER)
        delete = here.model.collector.delete
        with pytest.raises(WeightSyncError, match=r"version 1 .*a member of the fleet") as caught:
            await delete(1)
        assert caught.value.reason is Reason.VERSION_IN_USE
        folder, away = fleet.folder / "register", tmp_path / "away"
        await asyncio.to_thread(folder.rename, away)
        with pytest.raises(WeightSyncError, match="not known now") as caught:
            await delete(2)
        assert caught.value.reason is Reason.VERSION_IN_USE
        await asyncio.to_thread(away.rename, folder)
        await delete(1, force=True)
        await delete(2)
        assert kept(here) == []


async def test_nothing_is_collected_before_the_register_is_open(
    fleet: Fleet, tmp_path: Path
) -> None:
    needs = FleetNeeds("f")
    async with collecting(fleet, tmp_path / "o", needs=needs) as here:
        await push(here, 1, 2, 3, 4)
        assert kept(here) == [1, 2, 3, 4]
        with pytest.raises(WeightSyncError) as caught:
            await here.model.collector.delete(1)
        assert caught.value.reason is Reason.VERSION_IN_USE
        needs.read(fleet.register)
        await push(here, 5)
        assert kept(here) == [4, 5]
