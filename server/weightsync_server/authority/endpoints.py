"""Where the server listens, and whose authority a unix socket stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from weightsync_server.authority.roles import Role

__all__ = ["Endpoint"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address to listen on.

    Attributes:
        address: HOST:PORT or unix:PATH, as gRPC takes it.
        role: Of a unix socket: what whoever can open it may do. None: the socket says nothing.
    """

    address: str
    role: Role | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read HOST:PORT, unix:PATH or unix:PATH?role=ROLE.

        Raises:
            ValueError: With the remedy.
        """
        address, mark, query = text.partition("?")
        if not mark:
            return cls(address)
        key, _, value = query.partition("=")
        if not address.startswith("unix:") or key != "role" or value not in list(Role):
            msg = f"{text!r} is no address; only unix:PATH?role=... takes one of {', '.join(Role)}"
            raise ValueError(msg)
        return cls(address, Role(value))
