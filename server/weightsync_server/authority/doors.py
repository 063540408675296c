"""The listening sockets: a gRPC server for each kind of authority, TLS where others can connect."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.authority.file import AuthorityFile
from weightsync_server.authority.gate import Gate
from weightsync_server.authority.interceptor import AuthorityInterceptor
from weightsync_server.authority.tls import Certificates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from weightsync_server.authority.audit import Audit
    from weightsync_server.authority.endpoints import Endpoint
    from weightsync_server.settings import Settings

__all__ = ["Doors"]

logger = logging.getLogger(__name__)

#: How often is looked whether every address still listens, in seconds.
_LOOK_S = 0.5
#: Of unix sockets: owner and group may connect, nobody else, whatever the umask.
_SOCKET_UMASK = 0o117


@dataclass
class _Door:
    """Addresses of one kind of authority, and the gRPC server that listens on them."""

    group: list[Endpoint]
    server: grpc.aio.Server
    addresses: list[str]

    def shut(self) -> bool:
        """Return whether nobody listens any more; connects once."""
        return any(map(_shut, self.addresses))


class Doors:
    """Every address that the server listens on; nobody is served before `start`.

    Args:
        settings: Addresses, authority file, certificates.
        options: Of each gRPC server.

    Raises:
        WeightSyncError: REQUEST_INVALID; a file cannot be used, or proves nobody's authority.
    """

    def __init__(self, settings: Settings, options: Sequence[tuple[str, int]]) -> None:
        self._model = settings.name
        self._endpoints = settings.endpoints
        self._options = list(options)
        self._most_calls = settings.max_calls
        self._file = AuthorityFile(settings.authority) if settings.authority else None
        self._certificates: Certificates | None = None
        if settings.tls_cert and settings.tls_key:
            self._certificates = Certificates(
                settings.tls_cert, settings.tls_key, settings.tls_client_ca
            )
        self._doors: list[_Door] = []
        self._fallen: list[grpc.aio.Server] = []
        self._make: Callable[[list[Endpoint]], grpc.aio.Server] = _unbound
        self._tending: asyncio.Task[None] | None = None
        if self._file:
            _refuse_no_proof(self._file, takes_certificates=settings.tls_client_ca is not None)

    def bind(
        self,
        audit: Audit,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        serve: Callable[[grpc.aio.Server], None],
    ) -> list[str]:
        """Take every address and return them, with the ports that were chosen.

        Call it while no other thread makes files: it changes the umask for a moment.

        Args:
            audit: Told of every call.
            interceptors: Those that come after authority.
            serve: Adds the services to a gRPC server.

        Raises:
            RuntimeError: An address cannot be bound.
        """

        def make(group: list[Endpoint]) -> grpc.aio.Server:
            first = AuthorityInterceptor(Gate(group[0], self._file), self._model, audit)
            server = grpc.aio.server(
                interceptors=[first, *interceptors],
                options=self._options,
                maximum_concurrent_rpcs=self._most_calls,
            )
            serve(server)
            return server

        self._make = make
        for group in self._groups():
            server = make(group)
            addresses = [self._bind(server, endpoint.address) for endpoint in group]
            self._doors.append(_Door(group, server, addresses))
        return [address for door in self._doors for address in door.addresses]

    async def start(self) -> None:
        """Serve, and go on listening whatever a stranger sends."""
        for door in self._doors:
            await door.server.start()
        self._tending = asyncio.create_task(self._tend(), name="doors")

    async def close(self, grace_s: float) -> None:
        """Stop listening; calls under way get so many seconds to end."""
        if self._tending is not None:
            self._tending.cancel()
            await asyncio.wait([self._tending])
        stops = [asyncio.create_task(door.server.stop(grace_s)) for door in self._doors]
        # One that fell cannot end well.
        await asyncio.wait(stops, timeout=grace_s + 5)

    async def _tend(self) -> None:
        """Open again what was shut: a path that is no UTF-8 ends the accept loop of grpcio.

        Calls that were under way go on; the old server is kept for them.
        """
        while True:
            await asyncio.sleep(_LOOK_S)
            for door in self._doors:
                if not await asyncio.to_thread(door.shut):
                    continue
                try:
                    server = self._make(door.group)
                    for address in door.addresses:
                        self._bind(server, address)
                    await server.start()
                except RuntimeError:
                    logger.exception("%s cannot be opened again", door.addresses)
                    continue
                self._fallen.append(door.server)
                door.server = server
                logger.error("a request made gRPC stop listening; it listens again")

    def _groups(self) -> list[list[Endpoint]]:
        roles = dict.fromkeys(endpoint.role for endpoint in self._endpoints)
        return [[one for one in self._endpoints if one.role is role] for role in roles]

    def _bind(self, server: grpc.aio.Server, address: str) -> str:
        if address.startswith("unix:"):
            with _umask(_SOCKET_UMASK):
                server.add_insecure_port(address)
            return address
        if self._certificates is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, self._certificates.credentials())
        return f"{address.rpartition(':')[0]}:{port}"


def _refuse_no_proof(file: AuthorityFile, *, takes_certificates: bool) -> None:
    principals = file.current()
    if not principals.has_tokens and not (principals.has_certificates and takes_certificates):
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            "nobody could prove authority: the authority file has no token, and no certificate "
            "name that could be used; add tokens, or certificate names and --tls-client-ca",
        )


def _unbound(group: list[Endpoint]) -> grpc.aio.Server:
    msg = f"{group} is opened before bind"
    raise RuntimeError(msg)


def _shut(address: str) -> bool:
    place: str | tuple[str, int]
    if address.startswith("unix:"):
        family, place = socket.AF_UNIX, address.removeprefix("unix:")
    else:
        host, _, port = address.rpartition(":")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        place = (host.strip("[]"), int(port))
    with socket.socket(family) as probe:
        probe.settimeout(1)
        try:
            probe.connect(place)
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        except OSError:
            # Full, or slow: not shut.
            return False
    return False


@contextlib.contextmanager
def _umask(value: int) -> Iterator[None]:
    # From its first moment on nobody else may connect, which a chmod afterwards cannot promise.
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)
