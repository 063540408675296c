"""What every rank refuses for its content is no default again, for that engine with that model."""

from __future__ import annotations

import asyncio
import copy
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.engine.plant import ENGINE, Engine, Plant, checkpoint, plant, until
from tests.unit.server.world import MODEL, make_shard
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog import refused_contents
from weightsync_server.catalog.refused_contents import RefusedContents
from weightsync_server.store.store_records import write_document

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
async def it(tmp_path: Path) -> AsyncIterator[Plant]:
    async with plant(tmp_path, Engine(tmp_path / "segments.sock"), durable=True) as made:
        made.here.model.table.refused.open(tmp_path / "refused.json")
        await made.ready()
        # Pushes come unchecked, as while the engine is busy.
        made.here.model.accepted.asks.clear()
        yield made


async def _misfit(it: Plant, version: int, seed: int = 9) -> None:
    """Push a version of another model."""
    kinds = checkpoint(seed) | {"b": ("F16", (8, 4), bytes([seed]) * 64)}
    await it.here.push([make_shard(0, [(name, *kind) for name, kind in kinds.items()])], version)


async def _refused(it: Plant, version: int) -> WeightSyncError:
    with pytest.raises(WeightSyncError) as caught:
        await it.apply(version)
    assert caught.value.reason is Reason.ENGINE_REFUSED, caught.value.message
    return caught.value


def _info(it: Plant, version: int) -> pb.VersionInfo:
    return it.here.model.table.get(version).to_info()


async def test_it_is_shown_and_skipped_and_another_is_newest(it: Plant) -> None:
    await it.push(2)
    await _misfit(it, 3)
    await _refused(it, 0)
    info = _info(it, 3)
    assert info.serving == pb.SERVING_REJECTED
    assert info.rejected_reason.startswith(f"engine {ENGINE} refused it: rank 0/0/0 refused: ")
    assert (await it.apply()).version == 2, "the newest is the newest that it takes"
    # The content is what was found bad, whatever its number.
    await _misfit(it, 4)
    assert _info(it, 4).serving == pb.SERVING_REJECTED
    assert (await it.apply()).version == 2


async def test_of_a_change_what_it_keeps_is_named(it: Plant) -> None:
    await it.push(2)
    await _misfit(it, 3)
    table = it.here.model.table
    table.get(3).base = table.get(2)
    error = await _refused(it, 3)
    assert "version 3 is a change of version 2" in error.message
    assert "name another one with base=" in error.message
    table.get(3).base = None


async def test_an_apply_that_names_it_asks_again_and_counts(it: Plant) -> None:
    await _misfit(it, 2)
    await _refused(it, 2)
    await _refused(it, 2)
    it.engine._kinds["b"] = ("F16", (8, 4))
    await it.apply(2)
    assert not _info(it, 2).rejected_reason
    assert it.here.model.table.newest_applicable([ENGINE]).version == 2


async def test_it_is_known_after_a_restart_until_the_engine_has_another_model(
    it: Plant, tmp_path: Path
) -> None:
    await _misfit(it, 2)
    await _refused(it, 2)
    digest = _info(it, 2).content_digest
    layout = it.here.model.table.refused._engines[ENGINE].layout
    after = RefusedContents()
    after.open(tmp_path / "refused.json")
    assert after.refused_by([ENGINE], digest)
    assert after.reason(digest)
    await after.seen(ENGINE, layout)
    assert after.refused_by([ENGINE], digest)
    await after.seen(ENGINE, "another model")
    assert not after.refused_by([ENGINE], digest)
    again = RefusedContents()
    again.open(tmp_path / "refused.json")
    assert not again.reason(digest)


async def test_it_is_known_after_a_version_of_another_layout_was_live(it: Plant) -> None:
    own = it.here.model.table.refused._engines[ENGINE].layout
    assert own
    await _misfit(it, 2)
    await _refused(it, 2)
    # As for an engine that takes a tied head both written out and left out.
    it.engine._kinds["b"] = ("F16", (8, 4))
    await _misfit(it, 3, seed=8)
    await it.apply(3)
    reconciled = it.engine.calls.count("state")
    it.keeper.suspect("for a test")
    await until(lambda: it.engine.calls.count("state") > reconciled)
    await it.ready()
    assert _info(it, 2).rejected_reason
    assert it.here.model.table.refused._engines[ENGINE].layout == own


async def test_somebody_may_accept_it(it: Plant) -> None:
    await _misfit(it, 2)
    await _refused(it, 2)
    request = pb.ApplyVersionRequest(model=MODEL, version=2, clear_rejected=True)
    with pytest.raises(WeightSyncError):
        await it.applier.apply(request)
    await it.here.model.serving.accept(2)
    assert not _info(it, 2).rejected_reason


async def test_a_failure_is_no_refusal_of_the_content(it: Plant) -> None:
    await it.push(2)
    it.engine.before["prepare"] = lambda: (_ for _ in ()).throw(
        WeightSyncError(Reason.ENGINE_REFUSED, "the lease is not the current lease")
    )
    await _refused(it, 2)
    assert not _info(it, 2).rejected_reason


async def test_what_another_engine_may_take_is_not_shown_as_rejected() -> None:
    known = RefusedContents()
    for engine in ("a", "b"):
        await known.seen(engine, "layout")
    await known.refuse("a", "d1", "tensor x is extra")
    assert known.refused_by(["a"], "d1")
    assert not known.refused_by(["b"], "d1")
    assert not known.reason("d1")
    await known.refuse("b", "d1", "tensor x is extra")
    assert known.reason("d1") == "engine a refused it: tensor x is extra"
    known.left("b")
    await known.take("a", "d1")
    assert not known.reason("d1")


async def test_what_is_remembered_is_bounded_and_a_damaged_file_begins_anew(tmp_path: Path) -> None:
    known = RefusedContents()
    known.open(tmp_path / "refused.json")
    await known.seen("a", "layout")
    for number in range(70):
        await known.refuse("a", f"d{number}", "x" * 5000)
    assert (tmp_path / "refused.json").stat().st_size < 64 * 700
    again = RefusedContents()
    again.open(tmp_path / "refused.json")
    assert [n for n in range(70) if again.refused_by(["a"], f"d{n}")] == list(range(6, 70))
    (tmp_path / "refused.json").write_bytes(b"{}")
    again = RefusedContents()
    again.open(tmp_path / "refused.json")
    assert not again.refused_by(["a"], "d69")


async def test_what_two_engines_refuse_at_once_is_written_down_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, second = tmp_path / "refused.json", threading.Event()
    writes: list[set[str]] = []

    def slow(target: Path, document: dict[str, Any]) -> None:
        engines = copy.deepcopy(document)
        writes.append(set(engines["engines"]))
        if len(writes) == 1:
            # Longer than the next one takes, if that does not wait.
            second.wait(0.5)
        write_document(target, engines)
        if len(writes) > 1:
            second.set()

    monkeypatch.setattr(refused_contents, "write_document", slow)
    known = RefusedContents()
    known.open(path)
    first = asyncio.create_task(known.refuse("a", "0" * 32, "it does not fit"))
    await until(lambda: len(writes) == 1)
    cut = asyncio.create_task(known.refuse("b", "0" * 32, "nor there"))
    await asyncio.sleep(0)
    # Who waits for its turn is written all the same.
    cut.cancel()
    await first
    with pytest.raises(asyncio.CancelledError):
        await cut
    again = RefusedContents()
    again.open(path)
    assert again.refused_by(["a"], "0" * 32)
    assert again.refused_by(["b"], "0" * 32)
