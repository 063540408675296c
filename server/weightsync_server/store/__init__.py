"""Where versions are kept: `open_store` makes a `Store` from a URL."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from weightsync_server.store.local.local_store import LocalStore
    from weightsync_server.store.objects.object_store import ObjectStore
    from weightsync_server.store.protocol import Store
    from weightsync_server.store.version_reader import VersionReader

__all__ = ["open_reader", "open_store"]

#: Of a server without an identity, in a bucket, where an open push lies below it.
_UNNAMED = "unnamed"


def open_store(url: str, server: str = "") -> Store:
    """Return the store that `url` names, not yet opened.

    Args:
        url: `file:///absolute/path`, a plain path, `memory://`, or a bucket: `s3://bucket/prefix`,
            `gs://bucket/prefix`, `az://container/prefix`.
        server: Identity of the server, under which its open pushes lie there.

    Raises:
        WeightSyncError: NOT_SUPPORTED, naming what is.
    """
    # Fetcher processes import modules of this package and must start without asyncio and gRPC.
    from weightsync_server.store.memory_store import MemoryStore

    return MemoryStore() if url == "memory://" else _lasting(url, server, writes=True)


def open_reader(url: str) -> VersionReader:
    """Return what reads the versions of a store that another server has.

    Args:
        url: As for `open_store`, but no `memory://`: nobody else can read that.

    Raises:
        WeightSyncError: NOT_SUPPORTED, naming what is.
    """
    return _lasting(url, "", writes=False)


def _lasting(url: str, server: str, *, writes: bool) -> LocalStore | ObjectStore:
    from weightsync_server.store.local.local_store import LocalStore
    from weightsync_server.store.objects.object_keys import is_location

    if "://" not in url and url:
        return LocalStore(Path(url), server)
    parts = urlsplit(url)
    if is_location(url):
        return _object_store(url, (server or _UNNAMED) if writes else "")
    plain = not (parts.netloc or parts.query or parts.fragment)
    if parts.scheme == "file" and plain and parts.path.startswith("/"):
        return LocalStore(Path(unquote(parts.path)), server)
    raise WeightSyncError(
        Reason.NOT_SUPPORTED,
        f"no store can be opened at {url!r}; use file:///absolute/path, a plain path, "
        "s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or memory://",
    )


def _object_store(url: str, server: str) -> ObjectStore:
    try:
        from weightsync_server.store.objects.object_store import ObjectStore
    except ModuleNotFoundError as error:
        if error.name not in ("blake3", "obstore"):
            raise
        raise WeightSyncError(
            Reason.NOT_SUPPORTED,
            "run `pip install 'weightsync[objects]'`: a store in a bucket needs obstore and blake3",
        ) from None
    return ObjectStore(url, server)
