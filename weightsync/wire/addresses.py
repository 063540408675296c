"""Which addresses only this host can reach: both sides send plain text and tokens there alone."""

from __future__ import annotations

import ipaddress

__all__ = ["is_loopback", "is_private"]


def is_private(address: str) -> bool:
    """Return whether only this host can reach a gRPC address: a unix socket or loopback.

    Args:
        address: unix:PATH or HOST:PORT. Any other form is taken for one that others can reach.
    """
    return address.startswith("unix:") or is_loopback(address.rpartition(":")[0])


def is_loopback(host: str) -> bool:
    """Return whether only this host can reach a name or an IP address, which may stand in []."""
    host = host.strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
