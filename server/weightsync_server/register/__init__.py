"""Where a fleet decides: `open_register` makes a `Register` from a URL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.register.register_url import ETCD_SCHEMES, parse_folder_url
from weightsync_server.store.objects.object_keys import SCHEMES

if TYPE_CHECKING:
    from weightsync_server.register.etcd_tls import EtcdTls
    from weightsync_server.register.register import Register

__all__ = ["open_register"]


def open_register(url: str, tls: EtcdTls | None = None, *, timeout_s: float = 10.0) -> Register:
    """Return the register that `url` names; in a running event loop.

    Args:
        url: `file:///absolute/path`, or `etcd://host:port,host:port/prefix` (`etcds://` for TLS)
            with an address of each of etcd's members and the start of all keys; or
            `s3://bucket/prefix`, `gs://...` or `az://...`, a place that is used for nothing else.
        tls: Files for `etcds://`; None: the certificate authorities of this host, and no client
            certificate.
        timeout_s: The longest time of one call to etcd or a bucket, in seconds, with all tries.

    Raises:
        WeightSyncError: REQUEST_INVALID or NOT_SUPPORTED, naming what is wrong with it.
    """
    from weightsync_server.register.etcd_channels import EtcdChannels
    from weightsync_server.register.etcd_register import EtcdRegister
    from weightsync_server.register.etcd_url import parse_etcd_url
    from weightsync_server.register.folder_register import FolderRegister

    scheme = url.partition("://")[0]
    if tls and scheme != "etcds":
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            "certificates are for a register at etcds:// alone; name one, or leave them out",
        )
    if scheme in ETCD_SCHEMES:
        addresses, prefix = parse_etcd_url(url)
        return EtcdRegister(
            EtcdChannels(addresses, timeout_s, secure=scheme == "etcds", tls=tls), url, prefix
        )
    if scheme in SCHEMES:
        from weightsync_server.register.bucket_register import BucketRegister

        return BucketRegister(url, timeout_s)
    return FolderRegister(parse_folder_url(url))
