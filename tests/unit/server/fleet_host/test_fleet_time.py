"""For how long a member lets its engines serve: by the age of what it has read, and no longer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.unit.server.engine.plant import Engine, engine_set, limits, until
from tests.unit.server.world import MODEL, world
from weightsync import clock
from weightsync_server.coordination import open_register
from weightsync_server.engine import EngineContext, JournalFile
from weightsync_server.fleet.fleet_settings import FleetSettings
from weightsync_server.fleet.member_steps import HostMode
from weightsync_server.fleet_host.fleet_service import FleetService
from weightsync_server.ops.metrics import Metrics

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("max_age_s", [0.0, 30.0])
async def test_engines_get_what_is_left_of_the_last_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_age_s: float
) -> None:
    async with world(tmp_path, store=f"file://{tmp_path / 'store'}", slots=3) as here:
        file = JournalFile(tmp_path / "journal", here.model.store.url)
        shared = EngineContext(here.model, here.server, Metrics(MODEL), limits(), fleet="f")
        known = engine_set(file, {"e": Engine(tmp_path / "segments.sock")}, shared)
        options = FleetSettings(
            fleet="f",
            register=f"file://{tmp_path / 'register'}",
            member="a",
            max_age_s=max_age_s,
        )
        register = open_register(f"{options.register}/f")
        service = FleetService(options, register, tmp_path / "fleet.json", known, shared)
        left_s = shared.serving_time.left_s
        await service.host.begin()
        known.start()
        try:
            if not max_age_s:
                assert left_s is None
                return
            assert left_s is not None
            # Nothing was read: engines keep the time that they have.
            assert left_s() is None
            service.start("here")
            await until(lambda: service._member is not None and left_s() is not None)
            assert service._member is not None
            view = service._member.view
            left = left_s()
            assert left is not None
            assert left == pytest.approx(view.read_at + max_age_s - clock.boottime(), abs=1)
            view.read_at -= 20
            later = left_s()
            assert later is not None
            assert later == pytest.approx(left - 20, abs=1)
            with monkeypatch.context() as suspended:
                # Its engines count the time in which the host was suspended, too.
                boottime = clock.boottime
                suspended.setattr(clock, "boottime", lambda: boottime() + 5)
                later = left_s()
                assert later is not None
                assert later == pytest.approx(left - 25, abs=1)
                assert not service._member.state.stale
                suspended.setattr(clock, "boottime", lambda: boottime() + 20)
                later_state = service._member.state
                assert later_state.stale
            # What says that the host must not serve gives no time, however new it is.
            view.displaced = True
            assert left_s() is None
            # One that stands still does not serve by that: what it goes on with is decided.
            service._member._state = replace(service._member._state, mode=HostMode.PAUSED)
            assert left_s() is not None
        finally:
            await service.leave()
            await register.close()
            await known.stop()
            file.close()
