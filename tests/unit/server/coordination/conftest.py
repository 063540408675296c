from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest

from tests.support.etcd import Etcd
from tests.support.object_servers import ObjectServer
from weightsync_server.coordination import open_register

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from weightsync_server.coordination.coordination import CoordinationStore


@pytest.fixture(scope="session")
def one_etcd(etcd: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    cluster = Etcd(etcd, tmp_path_factory.mktemp("etcd"))
    yield cluster
    cluster.close()


@pytest.fixture
def place(reached: Callable[..., None]) -> Callable[..., str]:
    """Return what makes the URL of an empty place on a server, through another port if given."""

    def reach(server: ObjectServer, port: int = 0) -> str:
        reached(server, port)
        return f"{server.url}/{secrets.token_hex(8)}"

    return reach


@pytest.fixture(params=["folder", "etcd", "s3", "az"])
def url(request: pytest.FixtureRequest, tmp_path: Path, place: Callable[..., str]) -> str:
    """Return the URL of an empty register of each kind."""
    if request.param == "folder":
        return (tmp_path / "register").as_uri()
    if request.param in ("s3", "az"):
        return place(request.getfixturevalue(request.param))
    return str(request.getfixturevalue("one_etcd").url(f"tests/{secrets.token_hex(8)}"))


@pytest.fixture
async def another(url: str) -> AsyncIterator[Callable[[], CoordinationStore]]:
    """Return what opens the register once more, as another process would."""
    opened = []

    def open_one() -> CoordinationStore:
        opened.append(open_register(url))
        return opened[-1]

    yield open_one
    for one in opened:
        await one.close()


@pytest.fixture
def register(another: Callable[[], CoordinationStore]) -> CoordinationStore:
    return another()
