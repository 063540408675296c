"""Where versions are kept: `open_store` makes a `Store` from a URL."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.store.store_records import read_document, write_document

if TYPE_CHECKING:
    from weightsync_server.store.local.local_store import LocalStore
    from weightsync_server.store.objects.object_store import ObjectStore
    from weightsync_server.store.protocol import Store
    from weightsync_server.store.version_reader import VersionReader

__all__ = ["READERS", "STORES", "open_reader", "open_store", "server_identity"]

logger = logging.getLogger(__name__)

#: Of a server without an identity, in a bucket, where an open push lies below it.
_UNNAMED = "unnamed"


def open_store(url: str, server: str = "") -> Store:
    """Return the store that `url` names, not yet opened.

    A path, `file:///path`, `memory://`, `s3://bucket/prefix`, `gs://...` or `az://...`. Open pushes
    lie there under the identity `server`.
    """
    return STORES.get(_scheme(url), _folder)(url, server)


def open_reader(url: str) -> VersionReader:
    """Return what reads the versions of another server's store; no `memory://`."""
    return READERS.get(_scheme(url), _folder)(url)


def _scheme(url: str) -> str:
    return url.partition("://")[0] if "://" in url else ""


# Fetcher processes import modules of this package and must start without asyncio and gRPC.


def _folder(url: str, server: str = "") -> LocalStore:
    from weightsync_server.store.local.local_store import LocalStore

    if "://" not in url and url:
        return LocalStore(Path(url), server)
    parts = urlsplit(url)
    plain = not (parts.netloc or parts.query or parts.fragment)
    if parts.scheme == "file" and plain and parts.path.startswith("/"):
        return LocalStore(Path(unquote(parts.path)), server)
    raise WeightSyncError(
        Reason.NOT_SUPPORTED,
        f"no store can be opened at {url!r}; use file:///absolute/path, a plain path, "
        "s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or memory://",
    )


def _memory(url: str, server: str) -> Store:
    from weightsync_server.store.memory_store import MemoryStore

    return MemoryStore() if url == "memory://" else _folder(url, server)


def _bucket(url: str, server: str) -> Store:
    return _objects(url, server or _UNNAMED)


def _objects(url: str, server: str = "") -> ObjectStore:
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


#: What makes the store of a URL, by its scheme, from the URL and the server's identity; any other
#: is a folder, or refused.
STORES: dict[str, Callable[[str, str], Store]] = {
    "memory": _memory,
    "s3": _bucket,
    "gs": _bucket,
    "az": _bucket,
}
#: What makes the reader of a URL, the same way.
READERS: dict[str, Callable[[str], VersionReader]] = {
    "s3": _objects,
    "gs": _objects,
    "az": _objects,
}


_FILE, _KEY = "identity.json", "identity"


def server_identity(state_dir: Path) -> str:
    """Return the server's name, made at its first start, then kept; `state_dir` must exist."""
    path = state_dir / _FILE
    try:
        return str(read_document(path)[_KEY])
    except FileNotFoundError:
        pass
    except (ValueError, KeyError) as error:
        logger.warning("%s is damaged (%s): pushes that were open must be begun again", path, error)
    identity = secrets.token_hex(16)
    write_document(path, {_KEY: identity})
    return identity
