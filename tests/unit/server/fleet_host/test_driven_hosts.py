"""A member with real engines beside one with files, and a coordinator, over one register."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.fleet_hosts import FileHost
from tests.support.fleet_tasks import LIMITS, CutRegister, until
from tests.unit.server.engine.plant import Engine, engine_set, hurry, limits, shards, tensors
from tests.unit.server.fleet_host.test_fleet_host import Site
from tests.unit.server.world import MODEL, world
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.decide import ApplyOrder, ApplyPhase, Verdict
from weightsync_server.engine import EngineContext, JournalFile
from weightsync_server.fleet.fleet_records import decide, decision_key, encode_verdict
from weightsync_server.fleet.fleet_settings import FleetSettings
from weightsync_server.fleet.member_steps import HostMode
from weightsync_server.fleet_host.fleet_service import FleetService
from weightsync_server.ops.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.fleet_tasks import Fleet
    from weightsync_server.fleet.fleet_member import FleetMember

pytestmark = pytest.mark.timeout(30)

#: The member with engines, and the other one.
REAL, OTHER = "r", "b"

of_one = pytest.mark.parametrize("engines", [1], indirect=True)
of_two = pytest.mark.parametrize("engines", [2], indirect=True)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    monkeypatch.setattr(FleetSettings, "limits", LIMITS)


@contextlib.asynccontextmanager
async def driven(
    folder: Path, engines: dict[str, Engine], fleet: Fleet, *, cut: bool = False
) -> AsyncIterator[Site]:
    """A server in the fleet, its link to the register cut or not; engines outlive it."""
    async with world(folder, store=f"file://{folder / 'store'}", slots=3) as here:
        file = JournalFile(folder / "journal", here.model.store.url)
        shared = EngineContext(here.model, here.server, Metrics(MODEL), limits(), fleet="f")
        it = Site(here, engines, engine_set(file, engines, shared))
        link = CutRegister(folder / "register")
        link.cut = cut
        options = FleetSettings(fleet="f", register=link.url, member=REAL)
        service = FleetService(options, link, folder / "fleet.json", it.known, shared)
        it.host = service.host
        await it.host.begin()
        it.known.start()
        service.start("here")
        assert service._member is not None
        fleet.links[REAL], fleet.members[REAL] = link, service._member
        try:
            yield it
        finally:
            await service.leave()
            await it.known.stop()
            file.close()


@contextlib.asynccontextmanager
async def both(
    folder: Path, engines: dict[str, Engine], fleet: Fleet, *pushed: int
) -> AsyncIterator[Site]:
    """Two members that serve version 1, and others are pushed."""
    async with driven(folder, engines, fleet) as it:
        await until(lambda: serves(it, fleet, 1))
        await it.push(*pushed)
        await FileHost(folder / OTHER).commit(it.version(1))
        await fleet.start(OTHER)
        yield it


def real(fleet: Fleet) -> FleetMember:
    return fleet.members[REAL]


def serves(it: Site, fleet: Fleet, seed: int) -> bool:
    """Whether all engines do, and the member says so."""
    return it.serves() == {seed} and real(fleet).state.mode is HostMode.SERVING


async def read_again(member: FleetMember) -> None:
    """Return when a member has read the register many times more."""
    for _ in range(20):
        before = member.view.read_at
        member.view.look()
        await until(lambda before=before: member.view.read_at > before)


def dead() -> None:
    raise WeightSyncError(Reason.ENGINE_AWAY, "connection refused")


def die(*engines: Engine) -> None:
    """Have engines be away until they come back, as vLLM does that is started anew."""
    for engine in engines:
        engine.before |= dict.fromkeys(("health", "hello", "fence", "pause"), dead)
        # They hold their checkpoint then, which is version 1.
        engine.restart(tensors(1))
        engine.served.clear()


def come_back(*engines: Engine) -> None:
    for engine in engines:
        engine.before.clear()


@of_one
async def test_an_engine_that_comes_back_beside_an_apply_serves_nothing_that_was_left(
    tmp_path: Path, engines: dict[str, Engine], fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with both(tmp_path, engines, fleet, 2, 3) as it:
        fleet.freeze(REAL)
        await until(lambda: fleet.register._members.read(f"members+{REAL}") is None)
        coordinator = fleet.coordinator()
        # Without it; its engines go on with version 1.
        outcome = await coordinator.apply(it.version(2), ApplyOrder.BARRIER)
        assert (outcome.verdict, it.serves()) == (Verdict.COMMIT, {1})
        die(*engines.values())
        await until(lambda: it.host.live() is None)
        prepare, asked, goes_on = it.host.prepare, asyncio.Event(), asyncio.Event()

        async def held(*given: object) -> None:
            asked.set()
            await goes_on.wait()
            await prepare(*given)  # type: ignore[arg-type]  # as it was called

        monkeypatch.setattr(it.host, "prepare", held)
        # It is seen again, and reads nothing yet.
        fleet.thaw(REAL)
        fleet.links[REAL].cut = True
        await until(lambda: fleet.register._members.read(f"members+{REAL}"))
        applying = asyncio.create_task(coordinator.apply(it.version(3), ApplyOrder.BARRIER))
        await until(lambda: fleet.members[OTHER].view.history.running)  # type: ignore[union-attr]  # it has read
        fleet.links[REAL].cut = False
        await asked.wait()
        # Nor what vLLM itself has loaded, which nobody knows yet.
        with pytest.raises(WeightSyncError, match="version 2 was decided"):
            real(fleet).permitted_s(None)
        come_back(*engines.values())
        await until(lambda: real(fleet).state.mode is HostMode.FENCED)
        goes_on.set()
        assert (await applying).verdict is Verdict.COMMIT
        await until(lambda: serves(it, fleet, 3))
        assert [engine.served for engine in engines.values()] == [[3]] * len(engines)


@pytest.mark.parametrize("verdict", Verdict)
async def test_an_engine_that_comes_back_while_its_host_stands_still_waits_for_the_decision(
    tmp_path: Path,
    engines: dict[str, Engine],
    fleet: Fleet,
    monkeypatch: pytest.MonkeyPatch,
    verdict: Verdict,
) -> None:
    still, goes_on = asyncio.Event(), asyncio.Event()

    async def held(*args: Any, **given: Any) -> Verdict | None:
        still.set()
        await goes_on.wait()
        return await decide(*args, **given)

    monkeypatch.setattr("weightsync_server.fleet.coordinator.decide", held)
    async with both(tmp_path, engines, fleet, 2) as it:
        *others, last = engines.values()
        keeper = it.known.supervisors[-1]
        if others:
            # It is away before the others stand still, so that it is no part of that.
            die(last)
            await until(lambda: keeper.proved is None)
        applying = asyncio.create_task(fleet.coordinator().apply(it.version(2), ApplyOrder.BARRIER))
        await still.wait()
        assert it.serves() == {0}
        if others:
            come_back(last)
            await until(lambda: keeper.proved is not None)
        else:
            last.restart(tensors(1))
            last.served.clear()
        if verdict is Verdict.ABORT:
            await fleet.register.create(decision_key(1, 1), encode_verdict(verdict, "other"))
        assert last.served == []
        goes_on.set()
        assert (await applying).verdict is verdict
        decided = 2 if verdict is Verdict.COMMIT else 1
        await until(lambda: serves(it, fleet, decided))
        assert last.served == [decided]


@of_one
@pytest.mark.parametrize("kind", ApplyOrder)
@pytest.mark.parametrize("first", ["engines", "register"])
async def test_one_whose_server_is_started_anew_serves_until_its_turn_comes(
    tmp_path: Path, engines: dict[str, Engine], fleet: Fleet, kind: ApplyOrder, first: str
) -> None:
    patient = replace(LIMITS, prepare_s=3600.0, grace_s=3600.0)
    async with both(tmp_path, engines, fleet, 2) as it:
        gate = fleet.hosts[OTHER].gate = asyncio.Event()
        target = it.version(2)
        applying = asyncio.create_task(fleet.coordinator(patient).apply(target, kind))
        await until(lambda: (1, ApplyPhase.PREPARED) in real(fleet).view.said)
    known = asyncio.Event()
    for engine in engines.values():
        engine.events.clear()
        if first == "register":
            engine.before["state"] = known.wait
    async with driven(tmp_path, engines, fleet, cut=first == "engines") as it:
        if first == "engines":
            await until(lambda: it.host.live() is not None)
            fleet.links[REAL].cut = False
        else:
            # Nobody can say yet what they hold.
            await until(lambda: real(fleet).state.prepared is not None)
            known.set()
        await until(lambda: serves(it, fleet, 1))
        await read_again(real(fleet))
        assert serves(it, fleet, 1)
        if first == "engines":
            assert [engine.events for engine in engines.values()] == [[]] * len(engines)
        gate.set()
        assert (await applying).verdict is Verdict.COMMIT
        await until(lambda: serves(it, fleet, 2))


@of_two
@pytest.mark.parametrize(
    ("since", "kind", "why"),
    [
        ("its start", ApplyOrder.ROLLING, "no engine of this host answers (e0, e1)"),
        ("a decision", ApplyOrder.BARRIER, "no engine of this host answers (e0, e1)"),
        ("a moment", ApplyOrder.BARRIER, "the engine is not ready (connection refused)"),
    ],
)
async def test_an_apply_tells_at_once_that_the_engines_of_a_host_are_dead(
    tmp_path: Path,
    engines: dict[str, Engine],
    fleet: Fleet,
    since: str,
    kind: ApplyOrder,
    why: str,
) -> None:
    # Who waits for them waits for longer than the test.
    patient = replace(LIMITS, prepare_s=3600.0, undecided_s=3600.0, settle_s=3600.0)
    async with contextlib.AsyncExitStack() as servers:
        it = await servers.enter_async_context(both(tmp_path, engines, fleet, 2))
        target = it.version(2)
        if since != "a moment":
            await fleet.coordinator().apply(it.version(1), ApplyOrder.BARRIER)
        if since == "its start":
            await servers.aclose()
        die(*engines.values())
        if since == "its start":
            it = await servers.enter_async_context(driven(tmp_path, engines, fleet))
        it.host._limits = limits(prepare_timeout_s=3600.0)
        fenced = since != "a moment"
        await until(lambda: (real(fleet).state.mode is HostMode.FENCED) == fenced)
        await until(lambda: it.host.live() is None and real(fleet).view.presence.counts)
        outcome = await fleet.coordinator(patient).apply(target, kind)
        assert outcome.verdict is Verdict.ABORT
        assert outcome.reason.startswith(f"{REAL} is not prepared: {why}")
        # Of a rolling apply the first wave may have gone before that was said.
        await until(lambda: fleet.hosts[OTHER].serves == 1)
        come_back(*engines.values())
        await until(lambda: serves(it, fleet, 1))
        assert (await fleet.coordinator().apply(target, kind)).verdict is Verdict.COMMIT


@of_one
@pytest.mark.parametrize("kind", ApplyOrder)
async def test_one_that_has_the_content_under_another_number_stays_on_it(
    tmp_path: Path, engines: dict[str, Engine], fleet: Fleet, kind: ApplyOrder
) -> None:
    async with both(tmp_path, engines, fleet) as it:
        await it.here.push(shards(2), 9)
        target = replace(it.version(9), number=2)
        for _ in range(2):
            outcome = await fleet.coordinator().apply(target, kind)
            assert (outcome.verdict, outcome.lagging) == (Verdict.COMMIT, ())
            assert serves(it, fleet, 2)
            live = it.host.live()
            assert live is not None
            assert live.number == 9
            for engine in engines.values():
                engine.events.clear()
            await read_again(real(fleet))
            assert serves(it, fleet, 2)
            assert [engine.events for engine in engines.values()] == [[]] * len(engines)
    async with driven(tmp_path, engines, fleet) as it:
        await until(lambda: serves(it, fleet, 2))
        await read_again(real(fleet))
        assert serves(it, fleet, 2)
