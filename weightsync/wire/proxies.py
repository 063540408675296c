"""Whether gRPC goes through a proxy that the environment names: then a link may fail there."""

from __future__ import annotations

import ipaddress
import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from weightsync.wire.addresses import is_private

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["proxy_hint"]

#: In the order in which gRPC looks, in lower case alone:
#: https://github.com/grpc/grpc/blob/master/doc/environment_variables.md
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_EXCEPTIONS = ("no_grpc_proxy", "no_proxy")


def proxy_hint(address: str, environment: Mapping[str, str] | None = None) -> str:
    """Return which proxy the way to an address leads through, and how it does not; empty: none.

    Args:
        address: HOST:PORT, or unix:PATH.
        environment: Variables; None: those of this process.
    """
    env = os.environ if environment is None else environment
    if address.startswith("unix:") or is_private(address):
        return ""
    variable = next((name for name in _PROXIES if env.get(name)), "")
    host = address.rpartition(":")[0].rpartition("/")[2].strip("[]")
    if not variable or _excepted(host, env):
        return ""
    return (
        f"the way there leads through the proxy {_shown(env[variable])} ({variable}); add {host} "
        "to no_proxy to go without it"
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
