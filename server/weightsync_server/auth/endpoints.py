"""Where the server listens, and whose authority a unix socket stands for."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from weightsync_server.auth.roles import PUSH_WEIGHTS, RULES, Role

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["Endpoint", "ListenerOptions"]

_MAX_PORT = 65535
#: What ends with a port, or with the name of a service.
_WITH_PORT = re.compile(r".*:[\w-]+", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address to listen on.

    Attributes:
        address: HOST:PORT or unix:PATH, as gRPC takes it.
        role: Of a unix socket: what whoever can open it may do. None: the socket says nothing.
        private: Whether a unix socket is for its owner alone, and not for the group.
    """

    address: str
    role: Role | None = None
    private: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read HOST:PORT, unix:PATH or unix:PATH?role=ROLE.

        Raises:
            ValueError: With the remedy.
        """
        address, mark, query = text.partition("?")
        if not mark:
            if not address.startswith("unix:") and not _has_port(address):
                raise ValueError(
                    f"{text!r} names no port; write HOST:PORT, such as 127.0.0.1:50551 (a host of "
                    "IPv6 in brackets), or unix:PATH"
                )
            return cls(address)
        key, _, value = query.partition("=")
        if not address.startswith("unix:") or key != "role" or value not in list(Role):
            raise ValueError(
                f"{text!r} is no address; only unix:PATH?role=... takes one of {', '.join(Role)}"
            )
        return cls(address, Role(value))

    def __str__(self) -> str:
        """Return what `parse` reads."""
        return f"{self.address}?role={self.role}" if self.role else self.address

    @property
    def is_socket(self) -> bool:
        """Whether it is a unix socket."""
        return self.address.startswith("unix:")

    @property
    def takes_pushes(self) -> bool:
        """Whether a caller of PushWeights can have authority here."""
        return self.role is None or RULES[PUSH_WEIGHTS].allows(frozenset({self.role}))

    def ingest_endpoint(self, number: int) -> Self:
        """Return the endpoint of an ingest process: PORT + number, or unix:PATH.number.

        Raises:
            ValueError: With the remedy.
        """
        if self.is_socket:
            return replace(self, address=f"{self.address}.{number}")
        host, _, port = self.address.rpartition(":")
        if not port.isdecimal() or int(port) + number > _MAX_PORT:
            raise ValueError(
                f"{self.address} has no port of which {number} more is one; choose another"
            )
        # With port 0 each takes any that is free.
        return replace(self, address=f"{host}:{int(port) and int(port) + number}")


@dataclass(frozen=True, slots=True)
class ListenerOptions:
    """What `Listeners` need to know.

    Attributes:
        model: Model name.
        endpoints: Where to listen.
        max_connections: Connections at once to each address.
        max_calls: Calls at once, of every kind.
        authority: The authority file; None: there is none.
        tls_cert: The server's certificates, PEM; None: no TLS.
        tls_key: Its key, PEM.
        tls_client_ca: Who signs the certificates of clients, PEM; None: they need none.
    """

    model: str
    endpoints: Sequence[Endpoint]
    max_connections: int
    max_calls: int
    authority: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None


def _has_port(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return _WITH_PORT.fullmatch(address) is not None
    # The last part of a bare address of IPv6 is no port.
    return False
