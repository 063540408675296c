"""What a server finds out about an engine, and what it does about it."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.unit.server.engine.plant import Engine, Plant, cut_journal, plant, tensors, until
from weightsync.engine import VERSION_LOADS, CacheUse, PauseSpec
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.engine import JournalFile
from weightsync_server.engine.journal import Entry


def _deleted_files() -> int:
    """The engine offers a temporary file, which has no name."""
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            count += str(entry.readlink()).startswith(f"{tempfile.gettempdir()}/#")
    return count


async def test_the_checkpoint_is_adopted_proved_and_never_written(
    tmp_path: Path, engine: Engine
) -> None:
    async with plant(tmp_path, engine) as it:
        status = await it.ready()
        record = it.here.model.table.get(1)
        assert record.commit is not None
        assert record.commit.adopted
        assert engine.serves == engine.version == it.here.model.serving.live == 1
        assert engine.events == ["resume"], "never paused, for it never ran, and nothing written"
        assert [(r.rank, r.version) for r in status.ranks] == [("0/0/0", 1)]
        assert status.ranks[0].content_digest == record.content_digest
        assert it.leases() == {1: 1}
        assert it.journal.live == (1, 0)
        assert it.serving == [False, True]


async def test_adoption_leaves_no_descriptor_open(tmp_path: Path, engine: Engine) -> None:
    before = _deleted_files()
    async with plant(tmp_path, engine) as it:
        await it.ready()
        assert _deleted_files() == before


async def test_an_adoption_after_deleted_versions(tmp_path: Path, engine: Engine) -> None:
    # A new number must lie above all that were ever used, not only above those that are left.
    engine.before["hello"] = lambda: _fail(Reason.ENGINE_AWAY, "not yet")
    async with plant(tmp_path, engine, durable=True) as it:
        await it.push(5, 6)
        await it.here.model.collector.delete(6)
        engine.before.clear()
        await it.ready()
        assert it.here.model.serving.live == 7


def _fail(reason: Reason, text: str) -> None:
    raise WeightSyncError(reason, text)


async def test_an_adoption_whose_offer_fails_is_tried_again(tmp_path: Path, engine: Engine) -> None:
    async with plant(tmp_path, engine) as it:
        tries = 0

        def fail() -> None:
            nonlocal tries
            tries += 1
            if tries < 3:
                _fail(Reason.ENGINE_AWAY, "no checkpoint now")

        engine.before["offer"] = fail
        await it.ready()
        assert tries == 3
        assert engine.serves == 1
        assert not it.here.server._offers


def _do_more_than_copy(engine: Engine) -> None:
    """Let live parameters be others than the checkpoint's, as a loader's work leaves them."""
    offered = dict(engine.live)
    engine.live["b"] = bytes(64)

    async def differ() -> None:
        engine.live["b"], offered["b"] = offered["b"], engine.live["b"]

    def back(answer: Any) -> Any:
        engine.live["b"], offered["b"] = offered["b"], engine.live["b"]
        return answer

    engine.before["offer"], engine.after["offer"] = differ, back


async def test_a_model_whose_loader_does_more_than_copy_is_refused(
    tmp_path: Path, engine: Engine
) -> None:
    _do_more_than_copy(engine)
    async with plant(tmp_path, engine) as it:
        status = await it.until(pb.ENGINE_STATE_FENCED)
        await until(lambda: "fence" in engine.events)
        assert "not plain copies" in status.reason
        assert "(b)" in status.reason
        assert "commit" not in engine.events
        assert engine.serves == 0
        with pytest.raises(WeightSyncError, match="restart vLLM") as caught:
            await it.apply(1)
        assert caught.value.reason is Reason.ENGINE_FENCED
        calls = len(engine.calls)
        await asyncio.sleep(0.2)
        assert len(engine.calls) == calls, "it is not tried again on the same engine"
        assert it.leases() == {1: 0}


async def test_a_restarted_server_asks_the_ranks_and_pauses_nobody(
    tmp_path: Path, engine: Engine
) -> None:
    async with plant(tmp_path, engine, durable=True) as it:
        await it.bring(2)
    assert engine.serves == 2
    before = list(engine.events)
    async with plant(tmp_path, engine, durable=True) as it:
        await it.ready()
        assert it.here.model.serving.live == 2
        assert it.here.model.serving.rollback_to == 1
        assert engine.events == before
        assert (await it.rollback()).report.version == 1


async def test_a_server_that_died_after_the_commit_believes_the_ranks(
    tmp_path: Path, engine: Engine
) -> None:
    async with plant(tmp_path, engine, durable=True) as it:
        await it.bring(2)
    # As after a crash between the resume and DONE.
    assert b"DONE" in cut_journal(tmp_path)[0]
    async with plant(tmp_path, engine, durable=True) as it:
        assert it.journal.live == (1, 0)
        await it.ready()
        assert it.here.model.serving.live == engine.serves == 2
        assert it.here.model.serving.rollback_to == 1
        assert it.journal.live == (2, 1)


async def test_a_server_that_died_in_the_commit_places_the_last_live_version(
    tmp_path: Path, engine: Engine
) -> None:
    async with plant(tmp_path, engine, durable=True) as it:
        await it.ready()
        await it.push(2, 3)
        await it.apply(2)
    journal = JournalFile(tmp_path / "journal")
    journal.write(Entry("INTENT", "x", 3, 2))
    journal.close()
    # Half of version 3 is written; the bridge's lease ran out and it fenced.
    engine.live["a"] = tensors(3)["a"]
    engine._content, engine._dirty = "", True
    await engine.fence("the lease ran out")
    async with plant(tmp_path, engine, durable=True) as it:
        await it.ready()
        assert it.here.model.serving.live == engine.serves == 2
        assert it.journal.live == (2, 1), "the way back is kept"
        assert it.leases()[2] == 1


async def test_a_fenced_engine_is_placed_on_no_cache_and_whoever_has_paused_it(
    tmp_path: Path, engine: Engine
) -> None:
    async with plant(tmp_path, engine, durable=True) as it:
        await it.bring(2, 3)
    engine._content, engine._dirty = "", True
    await engine.fence("something was written")
    engine.live["a"], engine.cached = tensors(2)["a"], 2
    # Of a server that died while it placed something; nobody renews this lease.
    await engine.pause(PauseSpec(cache=CacheUse.KEEP), 60)
    begun = asyncio.get_running_loop().time()
    async with plant(tmp_path, engine, durable=True) as it:
        await it.ready()
        assert engine.serves == 3
        assert engine.stale == []
    assert asyncio.get_running_loop().time() < begun + 4, "it is not tried a second time"


async def test_a_server_that_died_in_the_pause_before_any_write(
    tmp_path: Path, engine: Engine
) -> None:
    async with plant(tmp_path, engine, durable=True) as it:
        await it.ready()
    await engine.pause(PauseSpec(), 60)
    async with plant(tmp_path, engine, durable=True) as it:
        await it.ready()
        assert engine.serves == 1
        assert "commit" not in engine.events


async def test_a_restarted_engine_gets_the_live_version_and_never_serves_its_disk(
    tmp_path: Path, engine: Engine
) -> None:
    async with plant(tmp_path, engine) as it:
        await it.bring(2)
        served: list[int] = []
        engine.after["resume"] = lambda answer: served.append(engine.serves) or answer  # type: ignore[func-returns-value]
        engine.restart(tensors(1))
        await until(lambda: bool(served))
        await it.ready()
        assert served == [2]
        assert it.here.model.serving.rollback_to == 1
        assert it.leases() == {1: 0, 2: 1}


async def test_a_restarted_engine_is_proved_against_its_checkpoint_before_anything_is_written(
    tmp_path: Path, engine: Engine
) -> None:
    async with plant(tmp_path, engine) as it:
        await it.bring(2)
        engine.restart(tensors(1))
        engine.events.clear()
        _do_more_than_copy(engine)
        status = await it.until(pb.ENGINE_STATE_FENCED)
        await until(lambda: "fence" in engine.events)
        assert "not plain copies of its checkpoint (b)" in status.reason
        assert set(engine.events) == {"fence"}, "nothing was written"
        assert it.leases() == {1: 0, 2: 0}


async def test_a_rank_that_does_not_answer_at_first_is_proved_before_it_is_written(
    tmp_path: Path, engine: Engine
) -> None:
    def silent(replies: Any) -> Any:
        engine.after.pop("state")
        return [reply | {"ok": False, "error": "out of memory"} for reply in replies]

    async with plant(tmp_path, engine) as it:
        await it.bring(2)
        engine.restart(tensors(1))
        engine.events.clear()
        _do_more_than_copy(engine)
        engine.after["state"] = silent
        await until(lambda: "fence" in engine.events)
        status = await it.until(pb.ENGINE_STATE_FENCED)
        assert "state" not in engine.after
        assert "not plain copies of its checkpoint (b)" in status.reason
        assert set(engine.events) == {"fence"}, "nothing was written"


async def test_what_one_rank_proved_of_the_checkpoint_excuses_no_other(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "segments.sock", ranks=2)
    other = engine.ranks[1]
    other.live["b"] = bytes(len(other.live["b"]))
    for _ in range(2):
        # The second server meets a rank that was proved by the first one.
        async with plant(tmp_path, engine) as it:
            status = await it.until(pb.ENGINE_STATE_FENCED)
            assert "not plain copies of its checkpoint (b)" in status.reason
    assert "commit" not in engine.events


def _told(it: Plant) -> dict[int, tuple[int, int, str]]:
    """Return what anybody can learn of the versions."""
    return {
        r.version: (r.durability, r.residency, r.content_digest) for r in it.here.model.table.list()
    }


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "in memory alone"])
@pytest.mark.parametrize("slots", [2, 3])
async def test_the_proof_of_a_restarted_engine_leaves_nothing_behind(
    tmp_path: Path, engine: Engine, stored: bool, slots: int
) -> None:
    async with plant(tmp_path, engine, durable=stored, slots=slots) as it:
        await it.bring(2)
        model, told, newest = it.here.model, _told(it), it.here.model.table.newest
        engine.restart({name: bytes(len(data)) for name, data in tensors(1).items()})
        engine.calls.clear()
        await until(lambda: "commit" in engine.calls)
        await it.ready()
        assert engine.calls.index("offer") < engine.calls.index("commit")
        assert engine.serves == model.serving.live == 2
        assert model.table.newest == newest
        assert model.serving.rollback_to == 1
        kept = _told(it)
        if stored:
            # What was evicted for the proof is read again for a rollback.
            assert {version: (d, c) for version, (d, _, c) in kept.items()} == {
                version: (d, c) for version, (d, _, c) in told.items()
            }
        else:
            assert kept == told
        await until(lambda: model.slots.reserved_bytes == model.segments.budget.reserved)
        states = [slot.state for slot in model.slots.status()]
        assert set(states) <= {"live", "staged", "free"}
        await it.push(3)
        await it.apply(3)
        assert (await it.rollback()).report.version == 2


async def test_a_server_that_dies_after_the_proof_still_places_the_live_version(
    tmp_path: Path, engine: Engine
) -> None:
    async with plant(tmp_path, engine, durable=True) as it:
        await it.bring(2)
        # Version 1 is the checkpoint: what a rank claimed of it would be believed.
        engine.restart(tensors(1))
        engine.before["commit"] = lambda: _fail(Reason.ENGINE_AWAY, "the server dies here")
        engine.calls.clear()
        await until(lambda: "commit" in engine.calls)
    engine.before.clear()
    async with plant(tmp_path, engine, durable=True) as it:
        await it.ready()
        assert engine.serves == it.here.model.serving.live == 2
        assert not it.metrics.violations()["crash_safe"]


@pytest.mark.parametrize("known", [True, False], ids=["live known", "first start"])
@pytest.mark.parametrize(
    ("reason", "tried_again"), [(Reason.ENGINE_UNSUPPORTED, False), (Reason.ENGINE_REFUSED, True)]
)
async def test_an_engine_whose_checkpoint_cannot_be_had_is_fenced_with_the_remedy(
    tmp_path: Path, engine: Engine, reason: Reason, tried_again: bool, known: bool
) -> None:
    async with plant(tmp_path, engine) as it:
        if known:
            await it.bring(2)
        engine.restart(tensors(1))
        engine.events.clear()
        engine.before["offer"] = lambda: _fail(reason, "loaded from nothing; serve files")
        status = await it.until(pb.ENGINE_STATE_FENCED)
        assert status.reason == "loaded from nothing; serve files"
        assert "commit" not in engine.events
        engine.before.clear()
        if tried_again:
            await it.ready()
            assert engine.serves == it.here.model.serving.live == (2 if known else 1)


async def test_a_checkpoint_that_is_no_longer_whole_is_told_with_the_remedy(
    tmp_path: Path, engine: Engine
) -> None:
    async with plant(tmp_path, engine) as it:
        await it.bring(2)
        engine.restart(tensors(1))
        whole = dict(engine.live)

        def cut() -> None:
            engine.live["a"] = whole["a"][:-1]

        def mend(answer: Any) -> Any:
            engine.live.update(whole)
            return answer

        engine.before["offer"], engine.after["offer"] = cut, mend
        status = await it.until(pb.ENGINE_STATE_FENCED)
        assert "the engine's checkpoint cannot be read" in status.reason
        assert "restore its files" in status.reason
        assert it.leases() == {1: 0, 2: 0}
        del engine.before["offer"]
        await it.ready()
        assert engine.serves == 2


async def test_another_store_cannot_know_what_the_engine_serves(
    tmp_path: Path, engine: Engine
) -> None:
    # memory:// forgets: what cannot be gone back to is replaced by the engine's own checkpoint.
    async with plant(tmp_path, engine) as it:
        await it.bring(2)
    async with plant(tmp_path, engine) as it:
        await it.ready()
        assert it.here.model.serving.live
        assert engine.serves


class _WithLoaders(Engine):
    """Could load versions, and offers the files that it was started with."""

    def __init__(self, socket: Path) -> None:
        super().__init__(socket)
        self._abilities.add(VERSION_LOADS)

    async def offer_checkpoint(self, segment_socket: str, offer_id: str) -> Any:
        live, self.live = self.live, {**tensors(1)}
        try:
            return await super().offer_checkpoint(segment_socket, offer_id)
        finally:
            self.live = live


async def test_what_another_server_wrote_is_not_taken_for_what_vllm_computes(
    tmp_path: Path,
) -> None:
    engine = _WithLoaders(tmp_path / "segments.sock")
    async with plant(tmp_path, engine) as it:
        await it.bring(2)
    engine.calls.clear()
    async with plant(tmp_path, engine) as it:
        status = await it.ready()
        assert engine.serves == 1, "the checkpoint is placed, and proved"
        assert "load" not in engine.calls
        assert it.keeper.loads is None
        assert status.ranks[0].transform == pb.TRANSFORM_PLAN
        assert status.ranks[0].content_digest == it.here.model.table.get(1).content_digest
        await it.push(3)
        await it.apply(3)
        assert engine.serves == 3


async def test_a_placing_that_fails_keeps_no_lease(tmp_path: Path, engine: Engine) -> None:
    async with plant(tmp_path, engine) as it:
        await it.bring(2)
        engine.wrong = [bytes(256)] * 3
        engine.restart(tensors(1))
        await until(lambda: not engine.wrong)
        await it.ready()
        assert engine.serves == 2
        assert it.leases()[2] == 1
        assert engine.events.count("fence") >= 3


async def test_a_pause_for_placing_never_outlives_a_failure(tmp_path: Path, engine: Engine) -> None:
    async with plant(tmp_path, engine) as it:
        await it.bring(2)
        # It serves something that nobody knows, and nothing can be staged.
        engine._content, engine._dirty = "", True

        async def no_slot(*_: object, **__: object) -> None:
            _fail(Reason.NO_SLOT, "no slot became free")

        stage = it.here.model.stager.stage
        it.here.model.stager.stage = no_slot  # type: ignore[assignment]
        it.keeper.suspect("who knows")
        await until(lambda: "fence" in engine.events)
        pauses = engine.events.count("pause")
        await asyncio.sleep(0.2)
        assert engine.events.count("pause") == pauses, "a fenced engine is not paused again"
        assert engine.serves == 0
        it.here.model.stager.stage = stage  # type: ignore[method-assign]
        await it.ready()
        assert engine.serves == 2


async def test_a_live_version_whose_bytes_are_lost_gives_way_to_the_one_before(
    tmp_path: Path, engine: Engine
) -> None:
    store = tmp_path / "store"
    async with plant(tmp_path, engine, store=f"file://{store}") as it:
        await it.bring(2)
    (shard,) = store.rglob("v2/*.safetensors")
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    engine.restart(tensors(1))
    async with plant(tmp_path, engine, store=f"file://{store}") as it:
        await it.ready()
        assert engine.serves == it.here.model.serving.live == 1


@pytest.mark.parametrize("call", ["resume", "prepare", "state", "release", "hello"])
@pytest.mark.parametrize(
    "reason", [Reason.ENGINE_REFUSED, Reason.ENGINE_AWAY, Reason.ENGINE_FENCED, Reason.FAULT]
)
async def test_what_fails_once_is_tried_again(
    tmp_path: Path, engine: Engine, call: str, reason: Reason
) -> None:
    def once() -> None:
        engine.before.pop(call)
        if call == "prepare" and reason is Reason.ENGINE_REFUSED:
            # That would be the model's own refusal, which lasts.
            return
        _fail(reason, "not now")

    engine.before[call] = once
    async with plant(tmp_path, engine) as it:
        await it.ready()
        assert call not in engine.before
        assert engine.serves == it.here.model.serving.live == 1


async def test_a_serving_engine_whose_ranks_claim_what_they_do_not_hold_is_a_violation(
    it: Plant,
) -> None:
    await it.push(2)
    await it.apply(2)
    # Every rank still says that it proved version 2.
    it.engine.live["a"] = tensors(1)["a"]
    it.keeper.suspect("who knows")
    await until(lambda: it.metrics.violations()["never_mixed"] == 1)
    await it.ready()
    assert it.engine.serves == 2


async def test_a_resume_of_a_placed_version_whose_answer_is_lost_is_asked_for(it: Plant) -> None:
    await it.push(2)
    await it.apply(2)
    it.engine.events.clear()
    it.engine.live["a"] = tensors(1)["a"]

    def lost(answer: Any) -> Any:
        raise WeightSyncError(Reason.ENGINE_AWAY, "the reply was lost")

    it.engine.after["resume"] = lost
    it.keeper.suspect("who knows")
    await until(lambda: "resume" in it.engine.events)
    await it.ready()
    assert it.engine.events == ["pause", "commit", "resume"], "neither fenced nor placed again"
    assert it.engine.serves == 2
