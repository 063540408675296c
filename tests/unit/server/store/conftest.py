"""Versions to commit for the tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.object_servers import ObjectServer
from tests.support.versions import Version, make_version
from weightsync_server.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync_server.store.protocol import Store


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the directory of the store, which does not exist yet."""
    return tmp_path / "store"


@pytest.fixture
async def store(root: Path) -> Store:
    """Return an opened local store."""
    opened = open_store(str(root))
    assert await opened.open() == []
    return opened


@pytest.fixture
def persisted(store: Store) -> Callable[..., Version]:
    """Return a function that makes a version whose shards are in the store, uncommitted."""

    def make(version: int = 1, **facts: Any) -> Version:
        made = make_version(version, **facts)
        made.write(store)
        return made

    return make


@pytest.fixture
def bucket(s3: ObjectServer, reached: Callable[..., None], tmp_path: Path) -> str:
    """Return the URL of an empty place in a bucket."""
    reached(s3)
    return f"{s3.url}/{tmp_path.name}"


#: Kinds of stores, and what opens each in an empty folder; None: a server of objects by that name.
KINDS: dict[str, str | None] = {
    "local": "{root}",
    "memory": "memory://",
    "s3": None,
    "az": None,
}


@pytest.fixture(params=KINDS)
async def any_store(
    request: pytest.FixtureRequest, root: Path, reached: Callable[..., None]
) -> Store:
    """Return an opened store of each kind."""
    url = KINDS[request.param]
    if url is None:
        server: ObjectServer = request.getfixturevalue(request.param)
        reached(server)
        url = f"{server.url}/{root.parent.name}"
    opened = open_store(url.format(root=root))
    assert await opened.open() == []
    return opened
