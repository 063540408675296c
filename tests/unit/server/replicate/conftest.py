"""An origin and a follower, each a whole receiving side in this process."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.support.object_servers import ObjectServer
from tests.unit.server.world import MODEL, World, world
from weightsync_server.auth.tls import ClientTls
from weightsync_server.catalog.garbage_collector import Retention
from weightsync_server.deltas import ChainSettings
from weightsync_server.ops.metrics import Metrics
from weightsync_server.replicate.follower import Follower, FollowMetrics
from weightsync_server.replicate.grpc_source import GrpcOrigin, OriginAccess
from weightsync_server.replicate.start_follower import Replica
from weightsync_server.replicate.store_source import ShardCache, StoreOrigin
from weightsync_server.store import open_reader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path
    from typing import Any

    from weightsync_server.replicate.version_source import Origin

__all__ = ["Following", "following"]


@dataclass
class Following:
    """A follower at work."""

    here: World
    follower: Follower
    metrics: Metrics

    def metric(self, name: str, **labels: str) -> float:
        """Return what operators see."""
        value = self.metrics.registry.get_sample_value(name, {"model": MODEL, **labels})
        assert value is not None
        return value

    def has(self, version: int, content: str = "") -> bool:
        """Tell whether a version is committed here, with some content."""
        record = self.here.model.table.find(version)
        commit = record.commit if record is not None else None
        return commit is not None and content in ("", commit.content_digest)


@contextlib.asynccontextmanager
async def following(
    folder: Path, url: str, *, cache: str = "", **options: Any
) -> AsyncIterator[Following]:
    """Have a world in `folder` follow a store, or a server, until the block ends."""
    replica = Replica()
    async with world(folder, origin=lambda: replica.follower, **options) as here:
        metrics = Metrics(MODEL)
        counts = FollowMetrics(metrics)
        origin = _origin(url, here, ShardCache(cache, counts.count_pieces) if cache else None)
        replica.follower = follower = Follower(origin, here.model, here.pushes, counts)
        follower.start()
        try:
            yield Following(here, follower, metrics)
        finally:
            await follower.stop()


def _origin(url: str, here: World, cache: ShardCache | None) -> Origin:
    if url.startswith("grpc://"):
        access = OriginAccess(url, ClientTls(peer="the origin"))
        return GrpcOrigin(access, MODEL, here.pushes, 60)
    return StoreOrigin(open_reader(url), MODEL, 0.02, here.meters, cache)


@pytest.fixture
async def origin(tmp_path: Path) -> AsyncIterator[World]:
    # It keeps every version in the form in which it was pushed.
    chains, retention = ChainSettings(64, 100.0), Retention(versions=64)
    async with world(tmp_path / "origin", chains=chains, retention=retention) as made:
        yield made


@pytest.fixture
def bucket(s3: ObjectServer, reached: Callable[..., None], tmp_path: Path) -> str:
    """Return the URL of an empty place in a bucket that this process reaches."""
    reached(s3)
    return f"{s3.url}/{tmp_path.name}"
