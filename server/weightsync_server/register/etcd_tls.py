"""Files for TLS to etcd, checked before they are used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightsync_server.auth.client_tls import ClientTls

if TYPE_CHECKING:
    from pathlib import Path

    import grpc

__all__ = ["EtcdTls"]


@dataclass(frozen=True)
class EtcdTls:
    """Files for TLS to etcd, PEM.

    Attributes:
        ca: Authorities that etcd's certificates come from; None: those of this host.
        certificate: The client's chain; None: it shows none.
        key: Its key, which others may not read.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files.

        Raises:
            WeightSyncError: REQUEST_INVALID; one is missing, cannot be read or does not fit.
        """
        return ClientTls("etcd", self.ca, self.certificate, self.key).credentials()
