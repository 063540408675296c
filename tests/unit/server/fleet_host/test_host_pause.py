"""A host that holds what its fleet goes to stands still in a pause: no request is refused."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.engine.plant import Engine, hurry, until
from tests.unit.server.fleet_host.test_fleet_host import Site, serving, site
from weightsync.engine import FENCES_ON_EXPIRY, EngineState, OnExpiry
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.fleet_host.host_pause import TakenHost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


@pytest.fixture
async def it(tmp_path: Path, engines: dict[str, Engine]) -> AsyncIterator[Site]:
    async with serving(tmp_path, engines) as made:
        for engine in engines.values():
            engine.events.clear()
        yield made


def states(it: Site) -> set[EngineState]:
    return {engine._condition for engine in it.engines.values()}


def done(it: Site) -> set[str]:
    return {event for engine in it.engines.values() for event in engine.events}


@pytest.mark.parametrize("committed", [True, False])
async def test_what_is_live_is_paused_and_goes_on_and_nothing_is_written(
    it: Site, committed: bool
) -> None:
    await it.host.pause()
    assert states(it) == {EngineState.PAUSED}
    await asyncio.sleep(0.1)
    assert states(it) == {EngineState.PAUSED}
    if committed:
        await it.host.commit(it.version(1))
    else:
        await it.host.resume()
    assert it.serves() == {1}
    assert done(it) == {"pause", "resume"}
    # And it takes part as before.
    await it.push(2)
    await it.host.prepare(it.version(2))
    await it.host.pause()
    await it.host.commit(it.version(2))
    assert it.serves() == {2}


async def test_nobody_serves_while_the_decision_is_not_learnt(it: Site) -> None:
    await it.host.pause()
    await it.host.fence("the decision was not learnt in time")
    await until(lambda: it.host.live() is not None)
    await asyncio.sleep(0.2)
    assert it.serves() == {0}
    await it.host.resume()
    assert it.serves() == {1}


async def test_a_server_that_dies_in_it_comes_back_and_asks(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with serving(tmp_path, engines) as it:
        await it.host.pause()
    assert {engine._lease.on_expiry for engine in engines.values()} == {OnExpiry.FENCE}
    async with site(tmp_path, engines) as it:
        await until(lambda: it.host.live() is not None)
        await asyncio.sleep(0.2)
        assert it.serves() == {0}
        await it.host.resume()
        assert it.serves() == {1}


async def test_an_engine_that_does_not_stand_has_the_others_go_on(it: Site) -> None:
    def fail() -> None:
        raise WeightSyncError(Reason.APPLY_BUSY, "somebody else has it")

    it.engines["e0"].before["pause"] = fail
    with pytest.raises(WeightSyncError, match="somebody else has it"):
        await it.host.pause()
    await until(lambda: it.serves() == {1})


async def test_the_others_go_on_while_one_is_still_asked(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    engines |= {f"e{number}": Engine(tmp_path / "segments.sock") for number in range(3)}
    slow = asyncio.Event()
    async with serving(tmp_path, engines) as it:
        engines["e0"].events.clear()
        engines["e1"].before["pause"] = lambda: _refuse_when(engines["e0"])
        engines["e2"].before["pause"] = lambda: _wait_for(slow)
        pausing = asyncio.create_task(it.host.pause())
        await until(lambda: "resume" in engines["e0"].events)
        assert not pausing.done()
        slow.set()
        with pytest.raises(WeightSyncError, match="somebody else has it"):
            await pausing
        await until(lambda: it.serves() == {1})


async def _wait_for(event: asyncio.Event) -> None:
    await event.wait()


async def _refuse_when(other: Engine) -> None:
    await until(lambda: other._condition is EngineState.PAUSED)
    raise WeightSyncError(Reason.APPLY_BUSY, "somebody else has it")


async def test_an_engine_that_would_resume_by_itself_is_fenced_as_before(it: Site) -> None:
    for one in it.known.supervisors:
        assert one._session is not None
        info = one._session.info
        object.__setattr__(info, "capabilities", info.capabilities - {FENCES_ON_EXPIRY})
    await it.host.pause()
    assert states(it) == {EngineState.FENCED}
    await until(lambda: it.host.live() is not None)
    await it.host.resume()
    assert it.serves() == {1}


async def test_a_fault_of_what_nobody_waits_for_is_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    let = asyncio.Event()

    class Failing(TakenHost):
        async def _close(self) -> None:
            await let.wait()
            raise RuntimeError("an engine could not be given back")

    nothing: Any = None
    closing = asyncio.create_task(Failing(nothing, nothing, nothing, 1.0).close())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    let.set()
    await until(lambda: "an engine could not be given back" in caplog.text)
