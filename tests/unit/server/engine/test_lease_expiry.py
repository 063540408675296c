"""Pauses of applies that others take part in, when their server is late or gone."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.unit.server.engine.plant import Engine, plant, until
from weightsync.engine import FENCES_ON_EXPIRY, EngineState, OnExpiry, OpenApply, PauseSpec
from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from pathlib import Path

APPLY = OpenApply("a1", 1, 2)


async def test_an_engine_that_could_only_resume_is_refused(tmp_path: Path, engine: Engine) -> None:
    engine._abilities.discard(FENCES_ON_EXPIRY)
    async with plant(tmp_path, engine) as it:
        await it.ready()
        async with it.keeper.exclusive() as session:
            with pytest.raises(WeightSyncError, match="same weightsync release") as caught:
                async with session.paused(PauseSpec(), APPLY):
                    pass
            assert caught.value.reason is Reason.ENGINE_UNSUPPORTED
            assert "pause" not in engine.calls
            # For an apply of this engine alone it is good enough.
            async with session.paused(PauseSpec()):
                await session.resume(session.live)
        assert engine.serves == 1


async def test_a_pause_outlasts_its_lease_while_it_is_renewed(
    tmp_path: Path, engine: Engine
) -> None:
    async with plant(tmp_path, engine, pause_lease_s=1.5) as it:
        await it.ready()
        async with it.keeper.exclusive() as session, session.paused(PauseSpec(), APPLY):
            assert (await engine.health()).open_apply == APPLY
            await asyncio.sleep(2)
            assert (await engine.health()).state is EngineState.PAUSED
            await session.resume(session.live)
        assert (await engine.health()).open_apply is None
        assert engine.serves == 1


async def test_a_server_that_was_late_cannot_resume_by_its_lease(
    tmp_path: Path, engine: Engine
) -> None:
    async with plant(tmp_path, engine, pause_lease_s=0.1) as it:
        await it.ready()

        def lost() -> None:
            raise WeightSyncError(Reason.ENGINE_AWAY, "lost")

        engine.before["renew"] = lost
        async with it.keeper.exclusive() as session, session.paused(PauseSpec(), APPLY):
            await until(lambda: engine._condition is EngineState.FENCED)
            assert engine.serves == 0
            with pytest.raises(WeightSyncError, match="not the current lease"):
                await session.resume(session.live)
        assert engine.events[-1] == "expire"
        # What every rank holds is asked, proved and served.
        await until(lambda: engine.serves == 1)
        await it.ready()


async def test_a_server_that_comes_back_takes_up_what_was_fenced(
    tmp_path: Path, engine: Engine
) -> None:
    async with plant(tmp_path, engine, durable=True) as it:
        await it.ready()
    await engine.pause(PauseSpec(on_expiry=OnExpiry.FENCE, apply=APPLY), 0.05)
    await until(lambda: engine._condition is EngineState.FENCED)
    assert engine.serves == 0
    async with plant(tmp_path, engine, durable=True) as it:
        await it.ready()
        assert engine.serves == 1
        assert "commit" not in engine.events
        assert (await engine.health()).open_apply is None
