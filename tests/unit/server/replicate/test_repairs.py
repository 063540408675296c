"""A newest version that is damaged here comes from the origin again, and is whole in the store."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.server.deltas.pushing import history, push_delta, sparse_history, until
from tests.unit.server.replicate.conftest import following
from tests.unit.server.world import MODEL, content, simple
from weightsync.errors import WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.scrubber import Scrubber

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.server.replicate.conftest import Following
    from tests.unit.server.world import World


def stored(here: World, version: int, name: str = "0.safetensors") -> Path:
    """Return a file of a version in a store that is a folder."""
    shard = here.model.store.shard_path(MODEL, version, 0)
    return Path(shard or "").with_name(name)


def flip(path: Path) -> Callable[[], object]:
    """Damage the last byte of a file; return what mends it."""
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    return lambda: path.write_bytes(good)


def fetched(there: Following) -> float:
    return there.metric("weightsync_follow_fetched_total", form="full")


def is_staged(there: Following, version: int) -> bool:
    record = there.here.model.table.find(version)
    if record is None or record.commit is None:
        return False
    return record.residency == pb.RESIDENCY_STAGED


async def test_a_copy_that_was_damaged_while_the_server_was_away_is_fetched_again(
    origin: World, tmp_path: Path
) -> None:
    await origin.push(simple(1), 1)
    async with following(tmp_path / "b", origin.model.store.url) as there:
        await until(lambda: there.has(1))
        file = stored(there.here, 1)
    flip(file)
    async with following(tmp_path / "b", origin.model.store.url) as there:
        await until(lambda: is_staged(there, 1))
        assert there.here.read(1) == [shard.data for shard in simple(1)]
        await until(lambda: file.read_bytes() == simple(1)[0].data)
    # It needs the origin no more.
    async with following(tmp_path / "b", f"file://{tmp_path}/nothing") as there:
        await until(lambda: is_staged(there, 1))


@pytest.mark.parametrize("name", ["manifest.json", "0.safetensors", "delta-0.safetensors"])
async def test_a_version_that_is_kept_as_a_delta_is_kept_in_full_then(
    origin: World, tmp_path: Path, name: str
) -> None:
    """Also where what it is based on is damaged."""
    versions = sparse_history(1)
    await origin.push(versions[0], 1)
    async with following(tmp_path / "b", origin.model.store.url) as there:
        await until(lambda: there.has(1))
        await push_delta(origin, versions[0], versions[1], 2)
        await until(lambda: there.has(2))
        assert there.here.model.table.get(2).base is not None
        flip(stored(there.here, 1 if name == "0.safetensors" else 2, name))
    async with following(tmp_path / "b", origin.model.store.url) as there:
        await until(lambda: is_staged(there, 2))
        assert there.here.read(2) == [shard.data for shard in versions[1]]
        record = there.here.model.table.get(2)
        await until(lambda: record.base is None)
        assert stored(there.here, 2).read_bytes() == versions[1][0].data
    async with following(tmp_path / "b", f"file://{tmp_path}/nothing") as there:
        await until(lambda: is_staged(there, 2))


@pytest.mark.parametrize("name", ["commit.json", "manifest.json", "1.safetensors"])
async def test_a_file_that_is_missing_is_fetched_again(
    origin: World, tmp_path: Path, name: str
) -> None:
    """Whether it is put aside at the start or missed only when it is read."""
    await origin.push(simple(1), 1)
    async with following(tmp_path / "b", origin.model.store.url) as there:
        await until(lambda: there.has(1))
        file = stored(there.here, 1, name)
    file.unlink()
    async with following(tmp_path / "b", origin.model.store.url) as there:
        await until(lambda: is_staged(there, 1))
        assert there.here.read(1) == [shard.data for shard in simple(1)]


@pytest.mark.parametrize("stored_too", [False, True], ids=["memory", "store"])
async def test_bytes_that_change_after_it_was_staged_are_replaced_at_once(
    origin: World, tmp_path: Path, *, stored_too: bool
) -> None:
    """By the store's, and by the origin's where the store's are damaged, too."""
    await origin.push(simple(1), 1)
    async with following(tmp_path / "b", origin.model.store.url) as there:
        await until(lambda: fetched(there) == 1)
        model = there.here.model
        # What an engine serves stays live meanwhile.
        model.serving.engine("here").set_live(1)
        if stored_too:
            flip(stored(there.here, 1))
        with await model.stager.stage(1, 5, for_engine=False) as lease:
            lease.segments[0].view[len(simple(1)[0].data) - 1] ^= 1
            with pytest.raises(WeightSyncError, match="a different digest"):
                await model.stager.verify(lease)
        await until(lambda: is_staged(there, 1))
        assert there.here.read(1) == [shard.data for shard in simple(1)]
        assert model.serving.live == 1
        await until(lambda: stored(there.here, 1).read_bytes() == simple(1)[0].data)
        await until(lambda: fetched(there) == 1 + stored_too)


async def test_what_the_scrubber_finds_is_written_anew_from_memory(
    origin: World, tmp_path: Path
) -> None:
    await origin.push(simple(1), 1)
    async with following(tmp_path / "b", origin.model.store.url) as there:
        await until(lambda: fetched(there) == 1)
        model, record = there.here.model, there.here.model.table.get(1)
        flip(stored(there.here, 1))
        scrubber = Scrubber(model.table, model.store, model.materializer.lock, 1 << 30)
        await scrubber.scrub(record)
        await until(lambda: not record.damaged)
        assert stored(there.here, 1).read_bytes() == simple(1)[0].data
        assert fetched(there) == 1
        # As often as it is found.
        flip(stored(there.here, 1, "1.safetensors"))
        await scrubber.scrub(record)
        await until(lambda: not record.damaged)
        assert stored(there.here, 1, "1.safetensors").read_bytes() == simple(1)[1].data


async def test_damage_at_both_ends_is_tried_again_until_the_origin_is_whole(
    origin: World, tmp_path: Path
) -> None:
    versions = history(1)
    await origin.push(versions[0], 1)
    async with following(tmp_path / "b", origin.model.store.url) as there:
        await until(lambda: there.has(1))
        flip(stored(there.here, 1))
    mend = flip(stored(origin, 1))
    async with following(tmp_path / "b", origin.model.store.url) as there:
        await until(lambda: there.metric("weightsync_follow_failures_total") > 1)
        assert not is_staged(there, 1)
        assert there.has(1, content(versions[0]))
        await asyncio.to_thread(mend)
        await until(lambda: is_staged(there, 1))
        assert there.here.read(1) == [shard.data for shard in versions[0]]


async def test_what_the_origin_has_no_more_is_told_and_what_comes_next_is_followed(
    origin: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await origin.push(simple(1), 1)
    async with following(tmp_path / "b", origin.model.store.url) as there:
        await until(lambda: there.has(1))
        flip(stored(there.here, 1))
    await origin.push(simple(2), 2)
    await origin.model.collector.delete(2)
    await origin.model.collector.delete(1)
    async with following(tmp_path / "b", origin.model.store.url) as there:
        await until(lambda: there.metric("weightsync_follow_failures_total") > 0)
        assert "a different digest" in caplog.text
        assert there.has(1)
        await origin.push(simple(3), 3)
        await until(lambda: is_staged(there, 3))


async def test_a_store_that_keeps_no_bytes_gets_them_again(origin: World, tmp_path: Path) -> None:
    await origin.push(simple(1), 1)
    async with following(tmp_path / "b", origin.model.store.url, store="memory://") as there:
        await until(lambda: fetched(there) == 1)
        model = there.here.model
        with await model.stager.stage(1, 5, for_engine=False) as lease:
            lease.segments[0].view[len(simple(1)[0].data) - 1] ^= 1
            with pytest.raises(WeightSyncError, match="a different digest"):
                await model.stager.verify(lease)
        await until(lambda: is_staged(there, 1))
        assert there.here.read(1) == [shard.data for shard in simple(1)]
        # It may be applied again.
        with await model.stager.stage(1, 5, for_engine=False) as lease:
            await model.stager.verify(lease)
