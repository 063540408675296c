"""What the server counts against itself."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.engine.plant import until
from tests.unit.server.world import World, simple, world
from weightsync_server import invariants
from weightsync_server.invariants import InvariantMonitor
from weightsync_server.ops.metrics import INVARIANTS, Metrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

_NONE = dict.fromkeys(INVARIANTS, 0)


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as made:
        await made.push(simple(0), 1)
        await made.push(simple(1), 2)
        await made.model.epochs.acquire("a")
        yield made


def _monitor(here: World, metrics: Metrics, late: Any = ()) -> InvariantMonitor:
    return InvariantMonitor(here.model, metrics, late)


def _census(here: World) -> tuple[InvariantMonitor, Metrics]:
    metrics = Metrics("m")
    return _monitor(here, metrics), metrics


async def test_a_server_at_work_violates_nothing(here: World) -> None:
    made, metrics = _census(here)
    for version in range(3, 7):
        made.look()
        await here.push(simple(version), version)
        made.look()
        await here.model.epochs.acquire("b")
    assert metrics.violations() == _NONE


def _lose_count(here: World) -> None:
    here.budget.reserved += 4096


def _go_over(here: World) -> None:
    here.budget.limit = 1


def _fall_back(here: World) -> None:
    here.model.epochs.newest = 0


def _change(here: World) -> None:
    record: Any = here.model.table.get(1)
    record.commit = replace(record.commit, content_digest="0" * 32)


def _half(here: World) -> None:
    here.model.table.get(1).commit = None


def _share_a_key(here: World) -> None:
    for record in here.model.table.list():
        record.commit = replace(record.commit, idempotency_key="k")  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("spoil", "invariant"),
    [
        (_lose_count, "no_leak"),
        (_go_over, "bounded"),
        (_fall_back, "stale_writer"),
        (_change, "version_immutable"),
        (_half, "commit_atomic"),
        (_share_a_key, "idempotent"),
    ],
)
async def test_what_must_not_be_is_counted_once_when_it_stays(
    here: World, spoil: Callable[[World], None], invariant: str
) -> None:
    made, metrics = _census(here)
    made.look()
    reserved, limit = here.budget.reserved, here.budget.limit
    spoil(here)
    made.look()
    assert metrics.violations() == _NONE
    made.look()
    made.look()
    assert metrics.violations() == _NONE | {invariant: 1}
    here.budget.reserved, here.budget.limit = reserved, limit


async def test_a_leak_that_grows_is_one_and_one_that_comes_again_another(here: World) -> None:
    made, metrics = _census(here)
    for leaked in (1, 1, 1, -3, 0, 1, 0):
        here.budget.reserved += 4096 * leaked
        made.look()
    here.budget.reserved -= 4096
    assert metrics.violations() == _NONE | {"no_leak": 2}


async def test_what_goes_on_past_its_bound_is_counted_once(here: World) -> None:
    late = ["a pause exceeded its time limit"]
    metrics = Metrics("m")
    made = _monitor(here, metrics, [lambda: late, list])
    made.look()
    assert metrics.violations() == _NONE
    for _ in range(3):
        made.look()
    assert metrics.violations() == _NONE | {"time_bounded": 1}


async def test_what_passes_is_not_counted(here: World) -> None:
    made, metrics = _census(here)
    for _ in range(3):
        _lose_count(here)
        made.look()
        here.budget.reserved -= 4096
        made.look()
    assert metrics.violations() == _NONE


async def test_it_looks_by_itself_until_it_is_stopped(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invariants, "_EVERY_S", 0.01)
    made, metrics = _census(here)
    _lose_count(here)
    made.start()
    await until(lambda: bool(metrics.violations()["no_leak"]))
    await made.stop()
    here.budget.reserved -= 4096
    assert metrics.violations() == _NONE | {"no_leak": 1}
