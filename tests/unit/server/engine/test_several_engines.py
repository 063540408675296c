"""Several engines beside one server: one copy in memory, one decision, nobody in between."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.engine.plant import (
    Engine,
    checkpoint,
    cut_journal,
    engine_set,
    hurry,
    limits,
    shards,
    until,
)
from tests.unit.server.world import MODEL, World, make_shard, world
from weightsync.engine import FENCES_ON_EXPIRY, EngineState
from weightsync.errors import Reason, WeightSyncError
from weightsync.log_lines import JsonLines
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.engine import (
    Applier,
    EngineContext,
    EngineSet,
    EngineSupervisor,
    JournalFile,
)
from weightsync_server.engine.journal import HOST
from weightsync_server.ops.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

NAMES = ("a", "b", "c")


@dataclass
class Host:
    """A server with several engines."""

    here: World
    engines: dict[str, Engine]
    set: EngineSet
    applier: Applier
    metrics: Metrics

    async def push(self, *seeds: int) -> None:
        for seed in seeds:
            await self.here.push(shards(seed), seed)

    async def apply(self, version: int = 0, **fields: Any) -> pb.ApplyVersionResponse:
        request = pb.ApplyVersionRequest(model=MODEL, version=version, **fields)
        return await self.applier.apply(request)

    async def rollback(self, **fields: Any) -> pb.RollbackResponse:
        return await self.applier.rollback(pb.RollbackRequest(model=MODEL, **fields))

    def supervisor(self, name: str) -> EngineSupervisor:
        (applier,) = self.set.named(name)
        return applier.supervisor

    def serves(self) -> dict[str, int]:
        """Return what each engine generates with; 0: nothing. A mixture fails."""
        return {name: engine.serves for name, engine in self.engines.items()}

    async def lose(self, name: str) -> None:
        """Have an engine gone until its `before` is cleared; returns when that is known."""
        self.engines[name].before["health"] = away
        await until(lambda: not self.supervisor(name).serving)

    async def settled(self) -> None:
        await until(lambda: all(one.serving for one in self.set.supervisors))

    async def all_serve(self, seed: int) -> None:
        def so() -> bool:
            settled = all(one.serving for one in self.set.supervisors)
            return settled and set(self.serves().values()) == {seed}

        await until(so)


@contextlib.asynccontextmanager
async def host(
    folder: Path, engines: dict[str, Engine], *, slots: int = 3, store: str = ""
) -> AsyncIterator[Host]:
    """Start a server beside engines, which outlive it."""
    store = store or f"file://{folder / 'store'}"
    async with world(folder, store=store, slots=slots) as here:
        file = JournalFile(folder / "journal", here.model.store.url)
        metrics = Metrics(MODEL)
        context = EngineContext(here.model, here.server, metrics, limits())
        known = engine_set(file, engines, context)
        applier = Applier(known, context)
        known.start()
        try:
            yield Host(here, engines, known, applier, metrics)
        finally:
            await applier.drain()
            await known.stop()
            file.close()


@contextlib.asynccontextmanager
async def serving(
    folder: Path, engines: dict[str, Engine], *pushed: int, slots: int = 3
) -> AsyncIterator[Host]:
    """A host whose engines all serve version 1, to which others are pushed."""
    async with host(folder, engines, slots=slots) as it:
        await it.all_serve(1)
        await it.push(*pushed)
        yield it


def away() -> None:
    """Be what a call of an engine meets that is gone."""
    raise WeightSyncError(Reason.ENGINE_AWAY, "connection refused")


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


@pytest.fixture
def engines(tmp_path: Path) -> dict[str, Engine]:
    return {name: Engine(tmp_path / "segments.sock", ranks=1 + at) for at, name in enumerate(NAMES)}


async def test_all_engines_join_at_one_version(tmp_path: Path, engines: dict[str, Engine]) -> None:
    async with host(tmp_path, engines) as it:
        await it.all_serve(1)
        assert it.here.model.serving.live == 1
        status = it.set.status()
        assert [one.name for one in status] == list(NAMES)
        assert {one.live_version for one in status} == {1}


async def test_together(tmp_path: Path, engines: dict[str, Engine]) -> None:
    async with serving(tmp_path, engines, 2) as it:
        reply = await it.apply(2)
        assert it.serves() == dict.fromkeys(NAMES, 2)
        assert [one.engine for one in reply.engines] == list(NAMES)
        assert {one.report.outcome for one in reply.engines} == {pb.APPLY_OUTCOME_APPLIED}
        assert (reply.report.version, reply.report.previous_version) == (2, 1)
        written = sum(one.report.written_bytes for one in reply.engines)
        assert reply.report.written_bytes == written > 0
        # One copy for all, with different numbers of ranks.
        assert len([s for s in it.here.model.slots.slots if s.record is not None]) <= 3
        again = await it.apply(2)
        assert again.report.outcome == pb.APPLY_OUTCOME_ALREADY_LIVE
        back = await it.rollback()
        assert it.serves() == dict.fromkeys(NAMES, 1)
        assert back.rejected_version == 2


@pytest.mark.parametrize("order", [pb.ENGINE_ORDER_TOGETHER, pb.ENGINE_ORDER_ROLLING])
async def test_engines_share_one_line_of_the_log(
    tmp_path: Path,
    engines: dict[str, Engine],
    caplog: pytest.LogCaptureFixture,
    order: pb.EngineOrder.ValueType,
) -> None:
    async with serving(tmp_path, engines, 2) as it:
        caplog.set_level(logging.INFO)
        caplog.clear()
        report = (await it.apply(2, order=order)).report
        (record,) = [one for one in caplog.records if one.levelno >= logging.INFO]
        paused_ms = report.phases.paused_total.ToNanoseconds() / 1e6
        assert record.message == (
            f"engines {', '.join(NAMES)}: version 2 is live, 1 before; {report.written_bytes} "
            f"bytes written, paused for {paused_ms:.1f} ms"
        )
        line = json.loads(JsonLines(MODEL).format(record))
        assert (line["event"], line["engine"]) == ("apply.done", ", ".join(NAMES))
        assert line["apply_id"] == report.apply_id


async def test_none_serves_the_version_while_another_serves_the_one_before(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with serving(tmp_path, engines, 2) as it:
        seen: set[tuple[int, ...]] = set()

        def look() -> None:
            seen.add(tuple(sorted(set(it.serves().values()) - {0})))

        def looked(answer: Any) -> Any:
            look()
            return answer

        for engine in engines.values():
            for call in ("pause", "commit", "resume"):
                engine.before[call] = look
                engine.after[call] = looked
        engines["b"].before["pause"] = lambda: asyncio.sleep(0.05)
        engines["c"].before["commit"] = lambda: asyncio.sleep(0.05)
        await it.apply(2)
        look()
        assert seen <= {(), (1,), (2,)}


@pytest.mark.parametrize("call", ["pause", "commit", "resume"])
@pytest.mark.parametrize("name", NAMES)
async def test_one_that_fails_takes_all_back_before_the_decision_and_none_after_it(
    tmp_path: Path, engines: dict[str, Engine], call: str, name: str
) -> None:
    async with serving(tmp_path, engines, 2) as it:

        def fail() -> None:
            del engines[name].before[call]
            raise WeightSyncError(Reason.ENGINE_AWAY, "it went away")

        engines[name].before[call] = fail
        if call == "resume":
            # It is tried again.
            await it.apply(2)
            await it.all_serve(2)
            return
        with pytest.raises(WeightSyncError, match=f"engine {name}") as caught:
            await it.apply(2)
        assert caught.value.metadata["apply_id"]
        await it.all_serve(1)
        # What the disk says is what they serve, and it can be done again.
        await it.apply(2, clear_rejected=True)
        await it.all_serve(2)


async def test_a_pause_that_runs_out_before_the_decision_fences(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with serving(tmp_path, engines, 2) as it:
        for supervisor in it.set.supervisors:
            assert supervisor._session is not None
            supervisor._session.lease_s = 3.0
        engines["b"].before["renew"] = away
        seen: dict[str, str] = {}

        async def late() -> None:
            await until(lambda: engines["b"]._condition is not EngineState.PAUSED)
            seen.update((name, one._condition.value) for name, one in engines.items())

        engines["c"].before["commit"] = late
        with pytest.raises(WeightSyncError, match="engine b"):
            await it.apply(2)
        # It holds the target, proved, and nobody had decided so; the others were renewed.
        assert seen == {"a": "paused", "b": "fenced", "c": "paused"}
        engines["b"].before.clear()
        await it.all_serve(2)


async def test_a_proof_that_fails_takes_all_back(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with serving(tmp_path, engines, 2) as it:
        engines["c"].wrong.append(bytes(256))
        with pytest.raises(WeightSyncError) as caught:
            await it.apply(2, idempotency_key="k")
        assert caught.value.reason is Reason.APPLY_RESTORED
        assert it.serves() == dict.fromkeys(NAMES, 1)
        assert it.here.model.serving.live == 1
    async with host(tmp_path, engines) as it:
        await it.all_serve(1)
        with pytest.raises(WeightSyncError) as again:
            await it.apply(2, idempotency_key="k")
        assert again.value.reason is Reason.APPLY_RESTORED
        assert "commit" not in [call for e in engines.values() for call in e.calls[-3:]]


async def test_an_engine_that_is_away_joins_before_it_serves(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with serving(tmp_path, engines, 2) as it:
        await it.lose("b")
        reply = await it.apply(2)
        report = {one.engine: one for one in reply.engines}
        assert "connection refused" in report["b"].absent
        assert not report["b"].HasField("report")
        assert (engines["a"].serves, engines["c"].serves) == (2, 2)
        # It comes back as it was, and as a new start.
        engines["b"].before.clear()
        await it.all_serve(2)
        assert it.here.model.serving.rollback_to == 1
        await it.rollback()
        assert it.serves() == dict.fromkeys(NAMES, 1)


async def test_an_engine_that_generates_and_cannot_be_asked_is_waited_for(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with serving(tmp_path, engines, 2) as it:
        it.supervisor("b").suspect("nobody knows")
        await it.apply(2)
        assert it.serves() == dict.fromkeys(NAMES, 2)


async def test_a_server_that_died_undecided(tmp_path: Path, engines: dict[str, Engine]) -> None:
    """One holds the target, proved, another the base: all go back, whatever they hold."""
    async with serving(tmp_path, engines, 2) as it:
        await it.apply(2)
    # Up to INTENT: all hold the target, and nobody had decided so.
    assert [b'"COMMIT"' in line for line in cut_journal(tmp_path, 2)] == [True, False]
    async with host(tmp_path, engines) as it:
        await it.all_serve(1)
        await it.apply(2)
        await it.all_serve(2)


async def test_a_server_that_died_after_the_decision(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with serving(tmp_path, engines, 2) as it:
        first = await it.apply(2, idempotency_key="k")
    cut_journal(tmp_path)
    # One of them started anew meanwhile, on its own checkpoint.
    engines["b"] = Engine(tmp_path / "segments.sock")
    async with host(tmp_path, engines) as it:
        await it.all_serve(2)
        again = await it.apply(2, idempotency_key="k")
        assert again.report.version == first.report.version
        assert again.report.outcome == pb.APPLY_OUTCOME_APPLIED
        assert it.here.model.serving.rollback_to == 1


async def test_a_server_that_died_after_one_engine_went_for_all(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    two = {name: engines[name] for name in ("a", "b")}
    between = pb.PauseOptions(mode=pb.PAUSE_MODE_BETWEEN_STEPS)
    async with serving(tmp_path, two, 2) as it:
        await it.lose("b")
        first = await it.apply(2, idempotency_key="k", pause=between)
        assert engines["a"].serves == 2
    # The ranks had switched, and nobody had written so.
    assert b'"DONE"' in cut_journal(tmp_path)[0]
    two["b"].before.clear()
    async with host(tmp_path, two) as it:
        await it.all_serve(2)
        again = await it.apply(2, idempotency_key="k", pause=between)
        assert again.report.version == first.report.version
        await it.all_serve(2)


async def test_one_engine_is_named(tmp_path: Path, engines: dict[str, Engine]) -> None:
    async with serving(tmp_path, engines, 2) as it:
        reply = await it.apply(2, engine="b")
        assert it.serves() == {"a": 1, "b": 2, "c": 1}
        assert [one.engine for one in reply.engines] == ["b"]
        assert it.here.model.serving.live == 0
        assert it.here.model.serving.is_live(1)
        with pytest.raises(WeightSyncError, match="no engine 'x'; this host has a, b, c"):
            await it.apply(2, engine="x")
        with pytest.raises(WeightSyncError, match="b from 2 to 1"):
            await it.rollback()
    # It is its own, also for the next server.
    async with host(tmp_path, engines) as it:
        await it.settled()
        assert it.serves() == {"a": 1, "b": 2, "c": 1}
        await it.apply(2)
        assert it.serves() == dict.fromkeys(NAMES, 2)
        await it.rollback(engine="c")
        assert it.serves() == {"a": 2, "b": 2, "c": 1}


async def test_rolling_leaves_the_others_serving(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with serving(tmp_path, engines, 2) as it:
        away: list[int] = []
        for engine in engines.values():
            engine.before["commit"] = lambda: away.append(list(it.serves().values()).count(0))
        reply = await it.apply(2, order=pb.ENGINE_ORDER_ROLLING)
        assert away == [1, 1, 1]
        assert it.serves() == dict.fromkeys(NAMES, 2)
        assert len(reply.engines) == 3
        await it.push(3)
        away.clear()

        def are_away() -> bool:
            return away == [2] or list(it.serves().values()).count(0) == 2

        async def both_away() -> None:
            await until(are_away)
            away.append(2)

        for name in ("a", "b"):
            engines[name].before["commit"] = both_away
        await it.apply(3, order=pb.ENGINE_ORDER_ROLLING, max_unavailable=2)
        assert away == [2, 2, 1]
        assert it.serves() == dict.fromkeys(NAMES, 3)


async def test_a_rolling_apply_that_fails_goes_back(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with serving(tmp_path, engines, 2) as it:
        engines["c"].wrong.append(bytes(256))
        with pytest.raises(WeightSyncError, match="engine c") as caught:
            await it.apply(2, order=pb.ENGINE_ORDER_ROLLING)
        assert caught.value.reason is Reason.APPLY_RESTORED
        assert it.serves() == dict.fromkeys(NAMES, 1)


async def test_a_rolling_apply_goes_back_after_what_nobody_foresaw(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with serving(tmp_path, engines, 2) as it:

        def fault() -> None:
            del engines["b"].before["commit"]
            raise TypeError("a fault")

        engines["b"].before["commit"] = fault
        with pytest.raises(WeightSyncError, match="see its log") as caught:
            await it.apply(2, order=pb.ENGINE_ORDER_ROLLING)
        assert caught.value.reason is Reason.FAULT
        await it.all_serve(1)


async def test_what_is_refused(tmp_path: Path, engines: dict[str, Engine]) -> None:
    async with serving(tmp_path, engines, 2, slots=2) as it:
        calls = (
            ({"order": pb.ENGINE_ORDER_ROLLING}, Reason.NO_SLOT, "--slots 3"),
            ({"max_unavailable": 1}, Reason.REQUEST_INVALID, "order ROLLING"),
            (
                {"pause": pb.PauseOptions(mode=pb.PAUSE_MODE_BETWEEN_STEPS)},
                Reason.REQUEST_INVALID,
                "cannot wait for each other",
            ),
        )
        for fields, reason, sentence in calls:
            with pytest.raises(WeightSyncError, match=sentence) as caught:
                await it.apply(2, **fields)
            assert caught.value.reason is reason
        assert it.serves() == dict.fromkeys(NAMES, 1)


async def test_an_engine_whose_lease_would_resume_takes_no_part(
    tmp_path: Path, engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, engines, 2) as it:
        session = it.supervisor("b")._session
        assert session is not None
        poorer = session.info.capabilities - {FENCES_ON_EXPIRY}
        object.__setattr__(session.info, "capabilities", poorer)
        with pytest.raises(WeightSyncError, match="engine b: the plugin in vLLM resumes"):
            await it.apply(2)
        await it.all_serve(1)


async def test_the_disk_refuses_the_decision(
    tmp_path: Path, engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, engines, 2) as it:
        write = it.set.journal.write

        def full(entry: Any) -> None:
            if entry.event == "COMMIT":
                raise OSError(28, "No space left on device")
            write(entry)

        monkeypatch.setattr(it.set.journal, "write", full)
        with pytest.raises(WeightSyncError, match="No space left") as caught:
            await it.apply(2)
        assert caught.value.reason is Reason.APPLY_RESTORED
        assert it.serves() == dict.fromkeys(NAMES, 1)
        last = next(it.set.journal.newest_first())
        assert (last.event, last.engine, last.version) == ("DONE", HOST, 1)


async def test_applies_of_many_callers_end_in_one_order(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with serving(tmp_path, engines, 2, 3, 4, slots=4) as it:
        calls = [it.apply(v, idempotency_key=str(v)) for v in (2, 3, 4)]
        calls += [it.apply(engine=name) for name in NAMES]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for outcome in outcomes:
            assert not isinstance(outcome, BaseException) or isinstance(outcome, WeightSyncError)
        await it.apply()
        await it.all_serve(4)


async def test_a_failure_of_some_leaves_others_on_their_own_version(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with serving(tmp_path, engines, 2, slots=4) as it:
        await it.apply(2, engine="c")
        engines["b"].wrong.append(bytes(256))
        with pytest.raises(WeightSyncError, match="engine b"):
            await it.apply(2)
        await asyncio.sleep(0.2)
        await it.settled()
        assert it.serves() == {"a": 1, "b": 1, "c": 2}
    async with host(tmp_path, engines, slots=4) as it:
        await it.settled()
        assert it.serves() == {"a": 1, "b": 1, "c": 2}


async def test_what_is_never_begun_keeps_no_lease(
    tmp_path: Path, engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def leases() -> dict[int, int]:
        slots = it.here.model.slots.slots
        return {slot.record.version: slot.leases for slot in slots if slot.record is not None}

    async with serving(tmp_path, engines, 2) as it:

        def full(_: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(it.set.journal, "write", full)
            with pytest.raises(WeightSyncError, match="No space left"):
                await it.apply(2)
        assert leases() == {1: 3, 2: 0}
        engines["a"].wrong.append(bytes(256))
        with pytest.raises(WeightSyncError, match="engine a"):
            await it.apply(2, order=pb.ENGINE_ORDER_ROLLING)
        await until(lambda: leases() == {1: 3, 2: 0})
        assert it.serves() == dict.fromkeys(NAMES, 1)


async def test_a_rollback_whose_resume_is_not_confirmed_rejects_all_the_same(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with serving(tmp_path, engines, 2) as it:
        await it.apply(2)

        engines["b"].before["resume"] = engines["b"].before["renew"] = away
        looks = 0

        def look(health: Any) -> Any:
            nonlocal looks
            looks += 1
            return health

        engines["b"].after["health"] = look
        with pytest.raises(WeightSyncError, match="engine b") as caught:
            await it.rollback(idempotency_key="k")
        assert caught.value.reason is Reason.ENGINE_AWAY
        engines["b"].before.clear()
        await it.all_serve(1)
        await until(lambda: bool(it.here.model.table.get(2).rejected_reason))
        assert (await it.rollback(idempotency_key="k")).rejected_version == 2


async def test_one_of_two_is_a_decision_for_both(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    two = {name: engines[name] for name in ("a", "b")}
    async with serving(tmp_path, two, 2) as it:
        await it.lose("b")
        await it.apply(2)
        lines = (tmp_path / "journal").read_bytes().splitlines(keepends=True)
        assert b"COMMIT" in lines[-2]
    # The server died before it was done, and b is back as it was.
    (tmp_path / "journal").write_bytes(b"".join(lines[:-1]))
    engines["b"].before.clear()
    async with host(tmp_path, two) as it:
        await it.all_serve(2)


async def test_what_is_live_already_is_decided_for_who_is_away(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    two = {name: engines[name] for name in ("a", "b")}
    async with serving(tmp_path, two, 2) as it:
        await it.apply(2, engine="a")
        await it.lose("b")
        assert (await it.apply(2)).report.outcome == pb.APPLY_OUTCOME_ALREADY_LIVE
        engines["b"].before.clear()
        await it.all_serve(2)


async def test_an_engine_of_which_nobody_knew_goes_back_with_a_rolling_apply(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    """Its ranks hold the target, and its resume was not confirmed."""
    async with serving(tmp_path, engines, 2) as it:
        engines["b"].before["resume"] = engines["b"].before["renew"] = away
        with pytest.raises(WeightSyncError, match="engine b"):
            await it.apply(2, order=pb.ENGINE_ORDER_ROLLING)
        engines["b"].before.clear()
        await it.all_serve(1)


async def test_a_version_is_rejected_only_for_its_own_fault(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with serving(tmp_path, engines, 2) as it:

        def asleep() -> None:
            del engines["b"].before["pause"]
            raise WeightSyncError(Reason.ENGINE_ASLEEP, "the engine sleeps")

        engines["b"].before["pause"] = asleep
        with pytest.raises(WeightSyncError, match="the engine sleeps"):
            await it.apply(2)
        assert not it.here.model.table.get(2).rejected_reason
        await it.apply(2)
        await it.all_serve(2)


async def test_the_way_back_outlives_an_apply_that_went_back(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with serving(tmp_path, engines, 2, 3, slots=4) as it:
        await it.apply(2)
        engines["b"].wrong.append(bytes(256))
        with pytest.raises(WeightSyncError, match="engine b"):
            await it.apply(3)
    async with host(tmp_path, engines, slots=4) as it:
        await it.all_serve(2)
        assert it.here.model.serving.rollback_to == 1
        await it.rollback()
        assert it.serves() == dict.fromkeys(NAMES, 1)


async def test_a_version_that_one_engine_left_is_not_spread(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with serving(tmp_path, engines, 2) as it:
        await it.apply(2)
        await it.rollback(engine="b")
        for version in (0, 2):
            with pytest.raises(WeightSyncError) as caught:
                await it.apply(version)
            assert caught.value.reason is Reason.VERSION_REJECTED
        assert it.serves() == {"a": 2, "b": 1, "c": 2}
        await it.apply(2, clear_rejected=True)
        assert it.serves() == dict.fromkeys(NAMES, 2)


async def test_layouts_are_checked_while_an_engine_is_away(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with host(tmp_path, engines) as it:
        await it.all_serve(1)
        await it.lose("b")
        await it.push(2)
        await it.apply(2)
        await asyncio.sleep(0.2)
        assert await it.here.model.accepted.names() == {"a", "b", "c"}


async def test_an_engine_of_another_model_has_no_say_in_pushes_for_the_others(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    other = Engine(tmp_path / "segments.sock")
    other._kinds = {**other._kinds, "b": ("F16", (8, 4))}
    engines["b"] = other
    async with host(tmp_path, engines) as it:
        await until(lambda: it.supervisor("a").serving and it.supervisor("c").serving)
        await until(lambda: bool(it.supervisor("b")._condition.refused))
        taken = checkpoint(2) | {"d": ("U8", (1,), b"x")}
        for name in ("a", "c"):
            engines[name].after["check"] = lambda replies: [
                {"ok": True, "rank": reply["rank"]} for reply in replies
            ]
        # What the others were never shown they are asked about; it is not.
        await it.here.push([make_shard(0, [(name, *kind) for name, kind in taken.items()])], 2)
        assert it.here.model.table.get(2).layout_check == pb.LAYOUT_CHECK_PASSED
        assert "check" not in other.calls
        assert "d" in await it.here.model.accepted.names()
