"""A follower fetches what somebody wants besides the newest, proved as that, or says why not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.versions import make_version
from tests.unit.server.deltas.pushing import history, push_delta, until
from tests.unit.server.replicate.conftest import following
from tests.unit.server.world import content, simple, world
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.garbage_collector import Retention
from weightsync_server.replicate.follower import WantedVersion

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.server.replicate.conftest import Following
    from tests.unit.server.world import World


async def test_it_comes_under_its_number_with_its_digests_and_is_not_collected_at_once(
    origin: World, tmp_path: Path
) -> None:
    for number in range(1, 6):
        await origin.push(simple(number), number, metadata={"step": str(number)})
    url, retention = origin.model.store.url, Retention(versions=1)
    async with following(tmp_path / "b", url, retention=retention, slots=3) as there:
        table = there.here.model.table
        await until(lambda: there.has(5))
        with there.follower.wanting(3, content(simple(3))):
            await until(lambda: there.has(3, content(simple(3))))
            await there.here.model.collector.close()
        record = table.get(3)
        assert record.residency == pb.RESIDENCY_STAGED
        assert record.metadata == {"step": "3"}
        assert there.here.read(3) == [shard.data for shard in simple(3)]
        assert (table.newest, table.highest, table.next_version()) == (5, 5, 6)
        await origin.push(simple(6), 6)
        await until(lambda: there.has(6))
        assert there.metric("weightsync_follow_failures_total") == 0
    # Nor does a restart know it differently.
    async with world(tmp_path / "b", retention=retention) as here:
        assert here.model.table.highest == 6


async def test_a_delta_whose_base_is_here_comes_as_one(origin: World, tmp_path: Path) -> None:
    versions = history(2)
    await origin.push(versions[0], 1)
    url = origin.model.store.url
    async with following(tmp_path / "b", url, slots=3) as there:
        await until(lambda: there.has(1))
    await push_delta(origin, versions[0], versions[1], 2)
    await push_delta(origin, versions[1], versions[2], 3)
    await origin.push(simple(9), 9)
    async with following(tmp_path / "b", url, slots=3) as there:
        await until(lambda: there.has(9))
        with there.follower.wanting(2):
            await until(lambda: there.has(2))
        await until(lambda: there.metric("weightsync_follow_fetched_total", form="delta") == 1)
        assert there.here.read(2) == [shard.data for shard in versions[1]]


async def test_several_that_are_wanted_come_one_after_the_other(
    origin: World, tmp_path: Path
) -> None:
    for number in range(1, 5):
        await origin.push(simple(number), number)
    async with following(tmp_path / "b", origin.model.store.url, slots=4) as there:
        await until(lambda: there.has(4))
        with there.follower.wanting(1), there.follower.wanting(2), there.follower.wanting(1):
            await until(lambda: there.has(1) and there.has(2))
        assert not there.has(3)
        await until(lambda: there.metric("weightsync_follow_fetched_total", form="full") == 3)


async def refused(there: Following, origin: World, wanted: str) -> WeightSyncError:
    """Want content 1 of an origin that has 2, and return why it will not come, once 3 has."""
    await until(lambda: there.has(2))
    with there.follower.wanting(1, wanted):
        refusal = await there.follower.lacking(1, wanted)
        await origin.push(simple(3), 3)
        await until(lambda: there.has(3))
    assert refusal is not None
    return refusal


async def test_what_has_other_content_is_not_what_is_wanted(origin: World, tmp_path: Path) -> None:
    await origin.push(simple(1), 1)
    await origin.push(simple(2), 2)
    async with following(tmp_path / "b", origin.model.store.url) as there:
        refusal = await refused(there, origin, content(simple(7)))
        assert refusal.reason is Reason.VERSION_UNKNOWN
        assert f"content {content(simple(1))} in" in refusal.message
        assert not there.has(1)


async def test_a_number_that_means_other_content_here_is_refused_and_not_fetched(
    origin: World, tmp_path: Path
) -> None:
    async with world(tmp_path / "b") as here:
        await here.push(simple(7), 1)
    await origin.push(simple(1), 1)
    await origin.push(simple(2), 2)
    async with following(tmp_path / "b", origin.model.store.url) as there:
        refusal = await refused(there, origin, content(simple(1)))
        assert refusal.reason is Reason.VERSION_CONFLICT
        assert "empty --state-dir" in refusal.message
        assert there.has(1, content(simple(7)))
        assert there.metric("weightsync_follow_failures_total") == 0


async def test_what_cannot_be_asked_for_is_not_said_to_lack(tmp_path: Path) -> None:
    async with following(tmp_path / "b", f"file://{tmp_path}/nothing") as there:
        assert await there.follower.lacking(1) is None


async def test_a_push_from_outside_never_fills_a_gap(origin: World) -> None:
    await origin.push(simple(3), 3)
    with pytest.raises(Exception, match="version 2 is not above 3"):
        await origin.push(simple(2), 2)


def test_the_number_counts_first_then_the_content() -> None:
    one, two, same = (
        make_version(number, content_digest=digest * 32).record
        for number, digest in ((1, "a"), (2, "b"), (3, "a"))
    )
    versions = [one, two, same]
    assert WantedVersion(1).among(versions) is one
    assert WantedVersion(1, "a" * 32).among(versions) is one
    assert WantedVersion(2, "a" * 32).among(versions) is same
    assert WantedVersion(9, "b" * 32).among(versions) is two
    assert WantedVersion(9).among(versions) is None
    assert "there is none yet" in WantedVersion(9).refusal([], "file:///nothing").message
