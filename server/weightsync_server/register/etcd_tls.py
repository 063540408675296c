"""Files for TLS to etcd, checked before they are used."""

from __future__ import annotations

from dataclasses import dataclass

from weightsync_server.auth.client_tls import ClientTls

__all__ = ["EtcdTls"]


@dataclass(frozen=True)
class EtcdTls(ClientTls):
    """The same, of etcd."""

    peer: str = "etcd"
