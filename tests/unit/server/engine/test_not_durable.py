"""Applies of versions that the disk does not have yet."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.unit.server.engine.plant import Plant, plant, shards, tensors, until
from tests.unit.server.world import Threads, begin
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
async def it(tmp_path: Path) -> AsyncIterator[Plant]:
    async with plant(tmp_path, durable=True) as made:
        await made.ready()
        yield made


def _disk(it: Plant) -> Threads:
    assert isinstance(it.here.fetchers, Threads)
    return it.here.fetchers


async def _arrive(it: Plant, seed: int) -> str:
    """Send a version to a disk that does not answer; return the id of the push."""
    _disk(it).gate = asyncio.Event()
    begun = await it.here.pushes.begin(begin(version=seed, shard_count=1), None)
    await it.here.join(begun.push_id, shards(seed)[0].all())
    record = it.here.model.table.get(seed)
    await until(lambda: record.residency == pb.RESIDENCY_STAGED)
    return begun.push_id


async def _commit(it: Plant, push: str) -> pb.CommitPushResponse:
    gate = _disk(it).gate
    assert gate is not None
    gate.set()
    return await it.here.pushes.commit(pb.CommitPushRequest(push_id=push))


def _label(it: Plant, version: int) -> tuple[int, int]:
    info = it.here.model.table.get(version).to_info()
    return info.durability, info.serving


async def test_only_on_request(it: Plant) -> None:
    push = await _arrive(it, 2)
    assert (await it.apply(0, require_durable=False)).outcome == pb.APPLY_OUTCOME_ALREADY_LIVE
    for asked in (None, True):
        with pytest.raises(WeightSyncError, match="require_durable") as caught:
            await it.apply(2, require_durable=asked)
        assert caught.value.reason is Reason.PUSH_INCOMPLETE
    assert (await it.apply(2, require_durable=False, dry_run=True)).plan.bytes
    report = await it.apply(2, require_durable=False)
    assert report.outcome == pb.APPLY_OUTCOME_APPLIED
    assert report.content_digest == it.here.model.table.get(2).content_digest
    assert report.durability == pb.DURABILITY_RECEIVING
    assert it.engine.live == tensors(2)
    assert _label(it, 2) == (pb.DURABILITY_RECEIVING, pb.SERVING_LIVE)
    assert (await it.verify()).verified
    assert not (await _commit(it, push)).already
    assert _label(it, 2) == (pb.DURABILITY_COMMITTED, pb.SERVING_LIVE)
    assert (await it.apply(2)).durability == pb.DURABILITY_COMMITTED


async def test_a_full_disk_leaves_it_live_and_a_rollback_works(it: Plant) -> None:
    push = await _arrive(it, 2)
    await it.apply(2, require_durable=False)
    with pytest.raises(WeightSyncError) as caught:
        await it.here.pushes.abort(pb.AbortPushRequest(push_id=push))
    assert caught.value.reason is Reason.VERSION_IN_USE
    _disk(it).full = True
    with pytest.raises(WeightSyncError) as caught:
        await _commit(it, push)
    assert caught.value.reason is Reason.DISK_EXHAUSTED
    assert _label(it, 2) == (pb.DURABILITY_FAILED, pb.SERVING_LIVE)
    assert it.engine.serves == 2
    assert (await it.verify()).verified
    answer = await it.rollback()
    assert (answer.report.version, answer.rejected_version) == (1, 0)
    assert it.engine.serves == 1
    assert it.here.model.table.find(2) is None
    assert it.leases() == {1: 1}


async def test_a_failed_apply_leaves_the_push_as_it_was(it: Plant) -> None:
    push = await _arrive(it, 2)
    it.engine.wrong = [b"x" * 256]
    with pytest.raises(WeightSyncError) as caught:
        await it.apply(2, require_durable=False)
    assert caught.value.reason is Reason.APPLY_RESTORED
    assert it.engine.serves == 1
    await _commit(it, push)
    assert _label(it, 2) == (pb.DURABILITY_COMMITTED, pb.SERVING_REJECTED)


async def test_an_engine_that_was_away_is_found_on_it(it: Plant) -> None:
    await _arrive(it, 2)
    await it.apply(2, require_durable=False)
    it.keeper.suspect("somebody wants to know")
    await until(lambda: not it.keeper.serving)
    await it.ready()
    assert it.engine.serves == it.here.model.serving.live == 2
    assert _label(it, 2) == (pb.DURABILITY_RECEIVING, pb.SERVING_LIVE)


async def test_a_new_server_serves_what_is_durable(tmp_path: Path) -> None:
    async with plant(tmp_path, durable=True) as it:
        await it.bring(2)
        await _arrive(it, 3)
        await it.apply(3, require_durable=False)
        engine = it.engine
        assert engine.serves == 3
    async with plant(tmp_path, engine, durable=True) as it:
        await it.ready()
        assert engine.serves == it.here.model.serving.live == 2
        # Its push may still go on; until it is committed nothing serves it.
        assert it.here.model.table.get(3).commit is None
