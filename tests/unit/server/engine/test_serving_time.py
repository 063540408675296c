"""A server that says for how long its engine may serve, whatever else it does with the engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.engine.plant import ENGINE, Engine, Plant, plant, until
from weightsync.engine import LIMITS_SERVING
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.engine.engine_parts import LimitRenewal, ServingTime

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Limited(Engine):
    """Remembers what it was given, and may be away."""

    def __init__(self, socket: Path) -> None:
        super().__init__(socket)
        self.given: list[float | None] = []
        self.away = 0

    async def serve_for(self, seconds: float | None) -> None:
        if self.away:
            self.away -= 1
            raise WeightSyncError(Reason.ENGINE_AWAY, "it does not answer")
        self.given.append(seconds)
        await super().serve_for(seconds)


@pytest.fixture
def engine(tmp_path: Path) -> Limited:
    return Limited(tmp_path / "segments.sock")


def _limit(it: Plant, left_s: Callable[[], float | None]) -> None:
    """Let the engine of a server be limited from its next start on."""
    it.keeper.context.serving_time.left_s = left_s
    it.engine.restart(it.engine.live)


async def test_a_lone_server_takes_away_the_limit_of_another_and_gives_none(
    tmp_path: Path, engine: Limited
) -> None:
    engine.away = 2
    engine._limit.move(1.5)
    async with plant(tmp_path, engine) as it:
        await it.ready()
        await until(lambda: engine.given == [None])
        await it.push(2)
        await it.apply(2)
        await asyncio.sleep(1.6)
        assert engine.given == [None]
        assert engine.serves == 2
        assert "overdue" not in engine.events


async def test_an_engine_gets_time_while_an_apply_has_it(tmp_path: Path, engine: Limited) -> None:
    async with plant(tmp_path, engine) as it:
        await it.ready()
        _limit(it, lambda: 0.5)
        await until(lambda: engine.serves == 1 and 0.5 in engine.given)
        await it.push(2)
        # For longer than it has time, and than its supervisor could ask it.
        engine.before["prepare"] = lambda: asyncio.sleep(1)
        await it.apply(2)
        assert engine.serves == 2
        assert "overdue" not in engine.events


async def test_an_engine_has_its_time_before_it_serves(tmp_path: Path, engine: Limited) -> None:
    async with plant(tmp_path, engine) as it:
        await it.ready()
        left: list[float | None] = [None]
        _limit(it, lambda: left[-1])
        given: list[Any] = []
        engine.before["resume"] = lambda: given.append(engine.given[-1])
        await until(lambda: engine.serves == 1)
        # Of what nobody knows it keeps what it has.
        assert given == [None]
        left.append(60.0)
        engine.restart(engine.live)
        await until(lambda: engine.serves == 1)
        assert given[-1] == 60.0


async def test_an_engine_without_time_stands_and_comes_back(
    tmp_path: Path, engine: Limited
) -> None:
    async with plant(tmp_path, engine) as it:
        await it.ready()
        left = [60.0]
        _limit(it, lambda: left[-1])
        await until(lambda: engine.serves == 1)
        left.append(-1.0)
        await until(lambda: "overdue" in engine.events)
        left.append(60.0)
        await until(lambda: engine.serves == 1)
        assert engine.serves == 1


async def test_what_is_left_is_said_soon_enough(
    engine: Limited, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = ServingTime(lambda: 0.2)
    renewal = LimitRenewal(engine, time)
    assert await renewal.renew() == pytest.approx(0.05)
    time.left_s = lambda: 3600.0
    assert await renewal.renew() == 0.5
    # Nothing is left to be in time for.
    time.left_s = lambda: -5.0
    assert await renewal.renew() == 0.5
    renewal.stop()


async def test_an_engine_that_cannot_be_limited_is_shown_as_such(
    tmp_path: Path, engine: Limited, caplog: pytest.LogCaptureFixture
) -> None:
    engine._abilities.discard(LIMITS_SERVING)
    async with plant(tmp_path, engine) as it:
        status = await it.ready()
        # Nobody asks for it.
        assert (status.name, list(status.warnings)) == (ENGINE, [])
        _limit(it, lambda: 60.0)
        await until(lambda: engine.serves == 1 and len(it.keeper.status().warnings) == 1)
        (warning,) = it.keeper.status().warnings
        assert "max_age_s" in warning
        assert "same weightsync release" in warning
        assert caplog.text.count(warning) == 1
