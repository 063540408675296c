from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import pytest

from tests.support.fleet_tasks import Fleet
from tests.support.object_servers import ObjectServer, azurite, moto, s3rver
from tests.unit.server.world import World, world
from weightsync.errors import WeightSyncError
from weightsync_server.store.objects.object_client import connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from tests.unit.server.world import Shard
    from weightsync.shm.segment_socket import OfferedFile

    Offered = Callable[[list[Shard]], list[OfferedFile]]


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as made:
        yield made


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    made = Fleet(tmp_path)
    yield made
    with contextlib.suppress(WeightSyncError):
        await made.close()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    """Return a server that speaks S3."""
    with moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def az(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    """Return a server that speaks Azure's protocol."""
    with azurite(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture(scope="session")
def overwriting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    """Return a server that speaks S3 and creates what exists."""
    with s3rver(tmp_path_factory.mktemp("s3rver")) as server:
        yield server


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that has this test reach a server, through another port if one is given."""

    def reach(server: ObjectServer, port: int = 0) -> None:
        for name, value in server.environment(port).items():
            monkeypatch.setenv(name, value)
        connect.cache_clear()

    yield reach
    connect.cache_clear()


@pytest.fixture
def offered(tmp_path: Path) -> Iterator[Offered]:
    """Return a function that offers shards as an engine offers the files of its checkpoint."""
    fds: list[int] = []

    def offer(shards: list[Shard]) -> list[OfferedFile]:
        files = []
        for shard in shards:
            path = tmp_path / f"{len(fds)}-{shard.name}"
            path.write_bytes(shard.data)
            fds.append(os.open(path, os.O_RDONLY))
            files.append((shard.name, len(shard.data), fds[-1]))
        return files

    yield offer
    for fd in fds:
        os.close(fd)
