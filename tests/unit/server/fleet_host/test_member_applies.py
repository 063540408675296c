"""What a host does for its fleet is in its history, with the number of the fleet's apply."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.fleet_tasks import LIMITS, until
from tests.unit.server.engine.plant import Engine, hurry
from tests.unit.server.fleet_host.test_driven_hosts import both, serves
from tests.unit.server.fleet_host.test_fleet_host import Site, prepared
from weightsync.errors import WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.decide import ApplyOrder
from weightsync_server.fleet.fleet_settings import FleetSettings

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.fleet_tasks import Fleet

pytestmark = pytest.mark.timeout(30)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    monkeypatch.setattr(FleetSettings, "limits", LIMITS)


def _of_member(it: Site) -> list[pb.ApplyRecord]:
    history = it.known.supervisors[0].context.history
    return [one for one in history.newest_first() if one.kind == pb.APPLY_KIND_MEMBER]


async def test_what_is_committed(tmp_path: Path, engines: dict[str, Engine]) -> None:
    async with prepared(tmp_path, engines) as it:
        await it.host.pause()
        assert not _of_member(it)
        await it.host.commit(it.version(2))
        (last,) = _of_member(it)
        assert (last.previous_version, last.version) == (1, 2)
        assert (last.result, last.requested_by) == (pb.APPLY_RESULT_APPLIED, "fleet f")
        assert last.phases.paused_total.ToNanoseconds() > 0
        assert sorted(one.engine for one in last.engines) == sorted(engines)
        assert last.slowest.engine in engines


async def test_what_the_fleet_decided_against(tmp_path: Path, engines: dict[str, Engine]) -> None:
    async with prepared(tmp_path, engines) as it:
        await it.host.pause()
        await it.host.resume()
        (last,) = _of_member(it)
        assert (last.result, last.version) == (pb.APPLY_RESULT_RESTORED, 2)
        assert "the fleet decided to abort it" in last.reason


async def test_what_fails_before_and_after_the_decision(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with prepared(tmp_path, engines) as it:
        it.engines["e0"].wrong = [b"\x09" * 256]
        with pytest.raises(WeightSyncError):
            await it.host.pause()
        (last,) = _of_member(it)
        assert (last.result, last.version) == (pb.APPLY_RESULT_RESTORED, 2)
        await it.host.prepare(it.version(2))
        it.engines["e0"].wrong = [b"\x09" * 256]
        with pytest.raises(WeightSyncError) as caught:
            await it.host.commit(it.version(2))
        last = _of_member(it)[0]
        assert (last.result, last.reason) == (pb.APPLY_RESULT_FENCED, caught.value.message)


@pytest.mark.parametrize("engines", [1], indirect=True)
async def test_its_number_in_the_fleet(
    tmp_path: Path, engines: dict[str, Engine], fleet: Fleet
) -> None:
    async with both(tmp_path, engines, fleet, 2) as it:
        outcome = await fleet.coordinator().apply(it.version(2), ApplyOrder.ROLLING)
        await until(lambda: serves(it, fleet, 2))
        last = _of_member(it)[0]
        assert (last.fleet_apply, last.version) == (outcome.number, 2)
        assert last.order == pb.ENGINE_ORDER_ROLLING
