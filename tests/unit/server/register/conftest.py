from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest

from tests.support.etcd import Etcd
from tests.support.object_servers import ObjectServer, azurite, moto, s3rver
from weightsync_server.register import open_register
from weightsync_server.store.objects.object_client import connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from weightsync_server.register.register import Register


@pytest.fixture(scope="session")
def one_etcd(etcd: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    cluster = Etcd(etcd, tmp_path_factory.mktemp("etcd"))
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def az(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with azurite(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture(scope="session")
def overwriting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    """Return a server that speaks S3 and creates what exists."""
    with s3rver(tmp_path_factory.mktemp("s3rver")) as server:
        yield server


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Return what makes the URL of an empty place on a server, through another port if given."""

    def reach(server: ObjectServer, port: int = 0) -> str:
        for name, value in server.environment(port).items():
            monkeypatch.setenv(name, value)
        connect.cache_clear()
        return f"{server.url}/{secrets.token_hex(8)}"

    yield reach
    connect.cache_clear()


@pytest.fixture(params=["folder", "etcd", "s3", "az"])
def url(request: pytest.FixtureRequest, tmp_path: Path, place: Callable[..., str]) -> str:
    """Return the URL of an empty register of each kind."""
    if request.param == "folder":
        return (tmp_path / "register").as_uri()
    if request.param in ("s3", "az"):
        return place(request.getfixturevalue(request.param))
    return str(request.getfixturevalue("one_etcd").url(f"tests/{secrets.token_hex(8)}"))


@pytest.fixture
async def another(url: str) -> AsyncIterator[Callable[[], Register]]:
    """Return what opens the register once more, as another process would."""
    opened = []

    def open_one() -> Register:
        opened.append(open_register(url))
        return opened[-1]

    yield open_one
    for one in opened:
        await one.close()


@pytest.fixture
def register(another: Callable[[], Register]) -> Register:
    return another()
