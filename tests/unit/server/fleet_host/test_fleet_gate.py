"""The gate in a fleet: the first wave scores for all, and what it refuses nobody keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.fleet_tasks import LIMITS, until
from tests.unit.server.engine.plant import Engine, hurry, probes, shards
from tests.unit.server.fleet_host.test_driven_hosts import both, driven, serves
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.decide import ApplyOrder, Verdict
from weightsync_server.engine.gate import pack_options, unpack_options
from weightsync_server.fleet.fleet_settings import FleetSettings

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.fleet_tasks import Fleet
    from tests.unit.server.fleet_host.test_fleet_host import Site

pytestmark = pytest.mark.timeout(60)

ORDERS = pytest.mark.parametrize("order", [ApplyOrder.ROLLING, ApplyOrder.BARRIER])


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    monkeypatch.setattr(FleetSettings, "limits", LIMITS)


async def _push(it: Site, seed: int, *, wrong: int = -1) -> None:
    await it.here.push(shards(seed), seed, probes=probes(seed, wrong=wrong))


def _scores(it: Site) -> list[int]:
    return [engine.events.count("score") for engine in it.engines.values()]


@ORDERS
async def test_a_member_alone_scores_for_the_fleet(
    tmp_path: Path, engines: dict[str, Engine], fleet: Fleet, order: ApplyOrder
) -> None:
    async with driven(tmp_path, engines, fleet) as it:
        await until(lambda: serves(it, fleet, 1))
        await _push(it, 2)
        await _push(it, 3, wrong=0)
        outcome = await fleet.coordinator().apply(it.version(2), order)
        assert outcome.verdict is Verdict.COMMIT
        await until(lambda: serves(it, fleet, 2))
        # Once before the pause and once in it, on the first engine.
        assert _scores(it) == [2, 0][: len(engines)]
        outcome = await fleet.coordinator().apply(it.version(3), order)
        assert outcome.verdict is Verdict.ABORT
        assert "unlike its trainer" in outcome.reason
        await until(lambda: serves(it, fleet, 2))
        assert all(3 not in engine.served for engine in engines.values())
        assert it.here.model.table.get(3).serving == pb.SERVING_REJECTED


@ORDERS
async def test_only_the_first_wave_scores_unless_all_are_to(
    tmp_path: Path, engines: dict[str, Engine], fleet: Fleet, order: ApplyOrder
) -> None:
    async with both(tmp_path, engines, fleet) as it:
        await _push(it, 2, wrong=0)
        await _push(it, 3, wrong=0)
        # The first is the other member, which has no engines.
        outcome = await fleet.coordinator().apply(it.version(2), order)
        assert outcome.verdict is Verdict.COMMIT
        await until(lambda: serves(it, fleet, 2))
        assert set(_scores(it)) == {0}
        each = pack_options(pb.GateOptions(each_engine=True))
        outcome = await fleet.coordinator().apply(it.version(3), order, gate=each)
        assert outcome.verdict is Verdict.ABORT
        await until(lambda: serves(it, fleet, 2))
        assert all(3 not in engine.served for engine in engines.values())


def test_options_travel_as_text() -> None:
    assert pack_options(pb.GateOptions()) == ""
    options = pb.GateOptions(when=pb.GATE_WHEN_AFTER, k3_limit=0.5, each_engine=True)
    assert unpack_options(pack_options(options)) == options
