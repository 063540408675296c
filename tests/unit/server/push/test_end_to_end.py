"""Begin, stream, commit, stage, live and adoption with real processes and files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tests.unit.server.world import content, one_stream, real_fetchers, simple, world
from weightsync.shm.segment_socket import SegmentClient
from weightsync.shm.segments import MappedSegment
from weightsync.shm.staged_version import StagedVersion
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from pathlib import Path


def read_as_engine(socket: Path, staged_id: str) -> tuple[StagedVersion, list[bytes]]:
    with SegmentClient(socket) as client:
        ((fd, size),) = client.map([staged_id])
        document = MappedSegment(fd, size)
        staged = StagedVersion.from_view(document.view)
        document.close()
        seen = []
        for (fd, size), shard in zip(
            client.map(staged.segments), staged.manifest.layout.shards, strict=True
        ):
            mapped = MappedSegment(fd, size)
            seen.append(bytes(mapped.view[: shard.size]))
            mapped.close()
    return staged, seen


async def test_one_stream_does_everything(tmp_path: Path) -> None:
    first, second = simple(1), simple(2)
    async with real_fetchers() as fetchers, world(tmp_path, fetchers=fetchers) as here:
        response = await here.pushes.stream(one_stream(first, commit=content(first)))
        assert response.commit.content_digest == content(first)
        assert response.commit.durable
        assert not response.commit.already
        assert response.received_bytes == sum(len(shard.data) for shard in first)
        assert here.read(1) == [shard.data for shard in first]

        assert await here.push(second) == 2
        lease = await here.model.stager.stage(2, 5)
        staged, seen = read_as_engine(here.server.path, lease.staged_id)
        assert staged.manifest.content_digest == content(second)
        assert seen == [shard.data for shard in second]
        await here.model.stager.verify(lease)
        here.model.serving.engine("engine").set_live(1)
        here.model.serving.engine("engine").set_live(2)
        assert here.model.serving.rollback_to == 1
        info = here.model.table.get(2).to_info()
        assert info.serving == pb.SERVING_LIVE
        assert info.trainer_verified
        lease.release()

        # Version 1 gives its slot to version 3 and comes back from the store.
        assert await here.push(simple(3)) == 3
        assert here.model.table.get(1).residency == pb.RESIDENCY_ABSENT
        lease = await here.model.stager.stage(1, 5)
        assert here.read(1) == [shard.data for shard in first]
        lease.release()
    async with real_fetchers() as fetchers, world(tmp_path, fetchers=fetchers) as here:
        assert [record.version for record in here.model.table.list()] == [3, 2, 1]
        lease = await here.model.stager.stage(2, 5)
        assert here.read(2) == [shard.data for shard in second]
        lease.release()


async def test_adoption_commits_a_checkpoint_once(tmp_path: Path) -> None:
    shards = simple(7)
    files = []
    for shard in shards:
        path = tmp_path / shard.name
        path.write_bytes(shard.data)
        files.append((shard.name, len(shard.data), os.open(path, os.O_RDONLY)))
    async with real_fetchers() as fetchers, world(tmp_path, fetchers=fetchers) as here:
        record = await here.model.adoption.adopt(files, 0)
        assert record.version == 1
        assert record.epoch == 0
        assert record.commit is not None
        assert record.commit.adopted
        assert record.content_digest == content(shards)
        assert here.read(1) == [shard.data for shard in shards]
        again = await here.model.adoption.adopt(files, 0)
        assert again is record
        assert [r.version for r in here.model.table.list()] == [1]
    async with real_fetchers() as fetchers, world(tmp_path, fetchers=fetchers) as here:
        again = await here.model.adoption.adopt(files, 0)
        assert again.version == 1
        assert again.residency == pb.RESIDENCY_STAGED
        assert here.read(1) == [shard.data for shard in shards]
    for _, _, fd in files:
        os.close(fd)
