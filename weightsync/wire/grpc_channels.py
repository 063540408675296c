"""gRPC channels and servers: addresses of this host alone, keepalive, calls found by name."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import grpc


def is_private(address: str) -> bool:
    """Whether only this host can reach unix:PATH or HOST:PORT; other forms count as reachable."""
    return address.startswith("unix:") or is_loopback(address.rpartition(":")[0])


def is_loopback(host: str) -> bool:
    """Whether only this host can reach a name or an IP address, which may stand in []."""
    host = host.strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def keepalive(silence_s: int, answer_s: int) -> list[tuple[str, int]]:
    """Return gRPC's options by which a peer is gone that is silent for both times together.

    It is pinged after `silence_s` without a byte and has `answer_s` to answer. On a slow link a
    ping waits behind what was sent before it.
    """
    return [
        ("grpc.keepalive_time_ms", 1000 * silence_s),
        ("grpc.keepalive_timeout_ms", 1000 * answer_s),
        # This one ends a connection whose peer is frozen: a minute, whatever the others say.
        ("grpc.http2.ping_timeout_ms", 1000 * answer_s),
    ]


#: Of whoever calls a server: gone after 25 s. Four megabytes that the kernel may have queued go out
#: before an answer comes at 280 kB/s or more.
CLIENT_KEEPALIVE = [*keepalive(10, 15), ("grpc.http2.max_pings_without_data", 0)]

#: Of a server: gone after 8 s, also where no call is under way. Nobody is hung up on for pinging
#: often: where a write is under way, gRPC copies all that it noted of the pings before with every
#: further one, so that those which the kernel had queued took a core for a minute. Answers cost as
#: little as the pings, and while 10,000 of them wait for their reader, gRPC reads no more from it.
SERVER_KEEPALIVE = [
    *keepalive(4, 4),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
]


def generic_only(server: grpc.aio.Server) -> grpc.aio.Server:
    """Return the server, which is not told of registered methods; its generic handlers serve them.

    For each registered method grpcio 1.85 keeps a call that waits for a caller. When a path that is
    no text ends its accept loop, it frees these waiting calls and has its core write into them
    after that, by which a process was seen to end with SIGSEGV. Generated code adds both kinds.
    """
    server.add_registered_method_handlers = _nothing  # type: ignore[method-assign]  # as told above
    return server


def _nothing(
    service_name: str, method_handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
) -> None:
    """Leave them to the generic handlers."""


#: In the order in which gRPC looks, in lower case alone:
#: https://github.com/grpc/grpc/blob/master/doc/environment_variables.md
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_EXCEPTIONS = ("no_grpc_proxy", "no_proxy")


def proxy_hint(address: str, environment: Mapping[str, str] | None = None) -> str:
    """Return which proxy leads to HOST:PORT or unix:PATH, and how to do without it; empty: none."""
    env = os.environ if environment is None else environment
    if address.startswith("unix:") or is_private(address):
        return ""
    variable = next((name for name in _PROXIES if env.get(name)), "")
    host = address.rpartition(":")[0].rpartition("/")[2].strip("[]")
    if not variable or _excepted(host, env):
        return ""
    return (
        f"add {host} to no_proxy to connect without the proxy: the connection goes through "
        f"{_shown(env[variable])} ({variable})"
    )


def _excepted(host: str, env: Mapping[str, str]) -> bool:
    text = next((env[name] for name in _EXCEPTIONS if env.get(name)), "")
    return any(_matches(host, one.strip()) for one in text.split(",") if one.strip())


def _matches(host: str, pattern: str) -> bool:
    if host.lower().endswith(pattern.lower()):
        return True
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(pattern, strict=False)
    except ValueError:
        return False


def _shown(url: str) -> str:
    """Return a proxy without the password that may stand in it."""
    try:
        parts = urlsplit(url if "//" in url else f"//{url}")
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "there"
    return f"{parts.hostname or '?'}{port}"
