"""Why the newest version is not live, as GetStatus says it, with what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.engine.plant import Plant, hurry, plant
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.status import AppliesStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
async def it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Plant]:
    hurry(monkeypatch)
    async with plant(tmp_path) as made:
        await made.ready()
        yield made


def _status(it: Plant, fleet: str = "", **fields: Any) -> pb.ModelStatus:
    model, history = it.here.model, it.keeper.context.history
    status = pb.ModelStatus(
        live_version=model.serving.live,
        newest_version=model.table.newest,
        engines=[it.keeper.status()],
        **fields,
    )
    AppliesStatus(model, history, fleet).fill(status)
    return status


async def test_what_is_live_needs_no_reason(it: Plant) -> None:
    status = _status(it)
    assert status.newest_not_live == ""
    assert status.live_age == status.newest_age
    assert status.live_age.ToNanoseconds() > 0


async def test_what_nobody_asked_for(it: Plant) -> None:
    await it.push(2)
    assert (
        _status(it).newest_not_live == "run `weightsync apply 2`: no apply of it has been requested"
    )
    assert "`weightsync fleet apply 2`" in _status(it, "f").newest_not_live
    await it.apply(2, dry_run=True)
    assert "no apply of it" in _status(it).newest_not_live
    assert _status(it).last_apply.kind == pb.APPLY_KIND_RECOVERY, "a dry run hides nothing"
    assert _status(it, apply_id="a1").newest_not_live == "apply a1 is in progress"


async def test_what_is_rejected(it: Plant) -> None:
    await it.push(2)
    await it.here.model.serving.reject(2, "it babbles")
    why = _status(it).newest_not_live
    assert why.startswith("set clear_rejected to apply it anyway")
    assert "it babbles" in why


async def test_what_could_not_be_applied(it: Plant) -> None:
    await it.push(2)
    it.engine.before["pause"] = _fail
    with pytest.raises(WeightSyncError):
        await it.apply(2)
    await it.ready()
    status = _status(it)
    assert "its last apply, at 2" in status.newest_not_live
    assert "no pause today" in status.newest_not_live
    assert (status.last_apply.version, len(status.last_apply.engines)) == (2, 0)
    it.engine.before.pop("pause")
    await it.apply(2)
    assert _status(it).newest_not_live == ""


def _fail() -> None:
    raise WeightSyncError(Reason.ENGINE_REFUSED, "no pause today")


async def test_an_engine_that_does_not_serve(it: Plant) -> None:
    await it.push(2)
    it.engine.before["health"] = _fail
    await it.until(pb.ENGINE_STATE_FENCED)
    assert _status(it).newest_not_live.startswith("engine engine is fenced: no pause today")
