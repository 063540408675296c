"""How the engines of a fleet's host pause, where the caller of the fleet's apply says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.engine.plant import Engine, hurry
from tests.unit.server.fleet_host.test_fleet_host import serving
from weightsync.engine import BETWEEN_STEPS, CACHE_LINEAGE, FENCES_ON_EXPIRY, CacheUse, PauseSpec
from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from pathlib import Path

_BETWEEN = PauseSpec(BETWEEN_STEPS, cache=CacheUse.KEEP)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


@pytest.fixture
def specs(engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch) -> list[PauseSpec]:
    """What engines are asked to pause by."""
    found: list[PauseSpec] = []

    def noted(engine: Engine) -> None:
        pause = engine.pause

        async def note(spec: PauseSpec, lease_s: float) -> Any:
            found.append(spec)
            return await pause(spec, lease_s)

        monkeypatch.setattr(engine, "pause", note)

    for engine in engines.values():
        noted(engine)
    return found


@pytest.mark.parametrize("barrier", [True, False])
async def test_every_engine_pauses_as_it_was_chosen(
    tmp_path: Path, engines: dict[str, Engine], specs: list[PauseSpec], barrier: bool
) -> None:
    async with serving(tmp_path, engines, 2) as it:
        specs.clear()
        chosen = PauseSpec("wait", cache=CacheUse.KEEP, wait_timeout_s=2.0, after_wait="abort")
        await it.host.prepare(it.version(2), chosen)
        if barrier:
            await it.host.pause()
        await it.host.commit(it.version(2))
        assert it.serves() == {2}
    assert len(specs) == len(engines)
    for spec in specs:
        asked = spec.mode, spec.cache, spec.wait_timeout_s, spec.after_wait
        assert asked == ("wait", CacheUse.KEEP, 2.0, "abort")


async def test_engines_change_between_two_steps_once_it_is_decided(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with serving(tmp_path, engines, 2, 3) as it:
        await it.host.prepare(it.version(2), _BETWEEN)
        for engine in engines.values():
            engine.events.clear()
        with pytest.raises(WeightSyncError, match="are not paused") as caught:
            await it.host.pause()
        assert caught.value.reason == Reason.ENGINE_REFUSED
        assert it.serves() == {1}
        await it.host.prepare(it.version(2), _BETWEEN)
        await it.host.commit(it.version(2))
        assert it.serves() == {2}
        assert it.host.live() == it.version(2)
        assert {tuple(one.events) for one in engines.values()} == {("switch",)}
        # The way back, and the next one, pause as where nobody chooses.
        await it.host.prepare(it.version(3))
        await it.host.commit(it.version(3))
        assert it.serves() == {3}


async def test_a_switch_that_fails_leaves_the_host_fenced_until_its_member_says_what_to_serve(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with serving(tmp_path, engines, 2) as it:
        last = list(engines.values())[-1]
        last.wrong = [bytes([9]) * 256]
        await it.host.prepare(it.version(2), _BETWEEN)
        with pytest.raises(WeightSyncError) as caught:
            await it.host.commit(it.version(2))
        assert caught.value.reason == Reason.APPLY_RESTORED
        assert it.serves() == {0}
        await it.host.resume()
        assert it.serves() == {1}


@pytest.mark.parametrize(
    ("ability", "pause", "sentence"),
    [
        (BETWEEN_STEPS, _BETWEEN, "cannot change weights between two steps"),
        (
            CACHE_LINEAGE,
            PauseSpec(BETWEEN_STEPS, CacheUse.RECOMPUTE),
            "cannot recompute keys between two steps",
        ),
        (FENCES_ON_EXPIRY, None, "resumes when a pause times out"),
        (FENCES_ON_EXPIRY, PauseSpec("abort"), "resumes when a pause times out"),
    ],
)
async def test_what_an_engine_cannot_is_refused_before_anything_pauses(
    tmp_path: Path,
    engines: dict[str, Engine],
    ability: str,
    pause: PauseSpec | None,
    sentence: str,
) -> None:
    list(engines.values())[-1]._abilities.discard(ability)
    async with serving(tmp_path, engines, 2) as it:
        for engine in engines.values():
            engine.events.clear()
        with pytest.raises(WeightSyncError, match=sentence):
            await it.host.prepare(it.version(2), pause)
        assert it.serves() == {1}
        assert [one.events for one in engines.values()] == [[] for _ in engines]
