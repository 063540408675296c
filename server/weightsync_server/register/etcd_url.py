"""What `etcd://host:port,host:port/prefix` names."""

from __future__ import annotations

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.register.register import check_key

__all__ = ["parse_etcd_url"]

_MAX_PORT = 65535


def parse_etcd_url(url: str) -> tuple[list[str], str]:
    """Return the addresses in `etcd://host:port,host:port/prefix` and the prefix.

    Raises:
        WeightSyncError: REQUEST_INVALID.
    """
    place, _, prefix = url.partition("://")[2].partition("/")
    if "@" in place:
        # Not quoted: the sentence may end in a log.
        raise _invalid("a register's URL takes no user and password; use etcds:// and certificates")
    addresses = place.split(",")
    for address in addresses:
        host, _, port = address.rpartition(":")
        bare = ":" in host and not (host.startswith("[") and host.endswith("]"))
        if not host or bare or not port.isdecimal() or not 0 < int(port[:9]) <= _MAX_PORT:
            raise _invalid(
                f"{address!r} in {url!r} is no address of etcd; use host:port, as in "
                "etcd://10.0.0.1:2379,10.0.0.2:2379/weightsync/NAME"
            )
    if len(set(addresses)) < len(addresses):
        raise _invalid(f"{url!r} names an address twice; name each member of etcd once")
    if not (prefix := prefix.rstrip("/")):
        raise _invalid(f"{url!r} has no prefix; end it in one of the fleet's own: /weightsync/NAME")
    return addresses, check_key(prefix)


def _invalid(sentence: str) -> WeightSyncError:
    return WeightSyncError(Reason.REQUEST_INVALID, sentence)
