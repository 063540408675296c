"""What the URL of a register names."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.register.etcd_url import parse_etcd_url
from weightsync_server.store.objects.object_keys import SCHEMES

__all__ = ["ETCD_SCHEMES", "check_register_url", "parse_folder_url", "unknown_register"]

ETCD_SCHEMES = ("etcd", "etcds")


def check_register_url(url: str, fleet: str) -> None:
    """Refuse a URL below which no fleet can decide; nothing is opened.

    Args:
        url: As it was given.
        fleet: What comes behind it.

    Raises:
        WeightSyncError: REQUEST_INVALID or NOT_SUPPORTED, naming what is wrong with it.
    """
    scheme = url.partition("://")[0]
    if scheme in ETCD_SCHEMES:
        parse_etcd_url(f"{url.rstrip('/')}/{fleet}")
    elif scheme not in SCHEMES:
        parse_folder_url(url)


def parse_folder_url(url: str) -> Path:
    """Return the folder that `file:///absolute/path` names.

    Raises:
        WeightSyncError: NOT_SUPPORTED; it names none.
    """
    parts = urlsplit(url)
    rest = parts.netloc or parts.query or parts.fragment
    if parts.scheme != "file" or rest or not parts.path.startswith("/"):
        raise unknown_register(url)
    return Path(unquote(parts.path))


def unknown_register(url: str) -> WeightSyncError:
    """Return the refusal of a URL that names no register."""
    return WeightSyncError(
        Reason.NOT_SUPPORTED,
        f"no register can be opened at {url!r}; use file:///absolute/path, "
        "etcd://host:port,host:port/prefix or etcds:// with the same, s3://bucket/prefix, gs:// or "
        "az://",
    )
