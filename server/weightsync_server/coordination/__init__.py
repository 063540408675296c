"""Where a fleet decides: `open_register` makes a `CoordinationStore` from a URL."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.coordination.etcd_channels import parse_etcd_url
from weightsync_server.store.objects.object_keys import SCHEMES

if TYPE_CHECKING:
    from weightsync_server.coordination.coordination import CoordinationStore
    from weightsync_server.coordination.etcd_channels import EtcdTls

__all__ = [
    "ETCD_SCHEMES",
    "check_register_url",
    "open_register",
    "parse_folder_url",
    "unknown_register",
]


ETCD_SCHEMES = ("etcd", "etcds")


def check_register_url(url: str, fleet: str) -> None:
    """Refuse a URL below which `fleet` cannot decide; nothing is opened."""
    scheme = url.partition("://")[0]
    if scheme in ETCD_SCHEMES:
        parse_etcd_url(f"{url.rstrip('/')}/{fleet}")
    elif scheme not in SCHEMES:
        parse_folder_url(url)


def parse_folder_url(url: str) -> Path:
    parts = urlsplit(url)
    rest = parts.netloc or parts.query or parts.fragment
    if parts.scheme != "file" or rest or not parts.path.startswith("/"):
        raise unknown_register(url)
    return Path(unquote(parts.path))


def unknown_register(url: str) -> WeightSyncError:
    return WeightSyncError(
        Reason.NOT_SUPPORTED,
        f"no register can be opened at {url!r}; use file:///absolute/path, "
        "etcd://host:port,host:port/prefix or etcds:// with the same, s3://bucket/prefix, gs:// or "
        "az://",
    )


def open_register(
    url: str, tls: EtcdTls | None = None, *, timeout_s: float = 10.0
) -> CoordinationStore:
    """Return the register that `url` names; call it in a running event loop.

    `url` is `file:///absolute/path`; or `etcd://host:port,host:port/prefix` (`etcds://` for TLS),
    with the address of each etcd member and the start of all keys; or `s3://bucket/prefix`,
    `gs://...` or `az://...`, a place used for nothing else. Without `tls`, `etcds://` trusts this
    host's certificate authorities and sends no client certificate. `timeout_s` bounds one call to
    etcd or a bucket, retries included.
    """
    from weightsync_server.coordination.etcd_channels import EtcdChannels, parse_etcd_url
    from weightsync_server.coordination.etcd_keys import EtcdKeys
    from weightsync_server.coordination.folder_keys import FolderKeys

    scheme = url.partition("://")[0]
    if tls and scheme != "etcds":
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            "certificates are for a register at etcds:// alone; name one, or leave them out",
        )
    if scheme in ETCD_SCHEMES:
        addresses, prefix = parse_etcd_url(url)
        return EtcdKeys(
            EtcdChannels(addresses, timeout_s, secure=scheme == "etcds", tls=tls), url, prefix
        )
    if scheme in SCHEMES:
        from weightsync_server.coordination.bucket_keys import BucketKeys

        return BucketKeys(url, timeout_s)
    return FolderKeys(parse_folder_url(url))
