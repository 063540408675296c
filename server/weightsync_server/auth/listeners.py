"""The listening sockets: a gRPC server for each kind of authority, TLS where others can connect."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from dataclasses import replace
from urllib.parse import unquote

import grpc

from weightsync.errors import invalid_request
from weightsync.wire.grpc_channels import SERVER_KEEPALIVE, generic_only
from weightsync.wire.socket_server import claimed, umask
from weightsync_server.auth.admission import Admission, Auditor
from weightsync_server.auth.auth_interceptor import MAX_MESSAGE_BYTES, AuthorityInterceptor
from weightsync_server.auth.principals import AuthorityFile
from weightsync_server.auth.roles import Endpoint, ListenerSettings
from weightsync_server.auth.tls import Certificates

logger = logging.getLogger(__name__)

_OPTIONS = (
    # Two servers on one port would be a silent split brain.
    ("grpc.so_reuseport", 0),
    # More than is legal, which we refuse with a reason; beyond it gRPC does, and cannot tell ours.
    ("grpc.max_receive_message_length", 4 * MAX_MESSAGE_BYTES),
    *SERVER_KEEPALIVE,
    # One connection takes neither all of `max_calls` nor gRPC's queue of calls not yet looked at:
    # beyond 1000 of those gRPC cancels calls at random, whoever made them.
    ("grpc.max_concurrent_streams", 128),
    # Windows that grow with the bandwidth are unbounded memory per slow stream: fix them.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4 << 20),
)
#: Of unix sockets, whatever the umask: owner and group may connect, or the owner alone.
_SOCKET_UMASK, _PRIVATE_UMASK = 0o117, 0o177
#: Seconds between two looks at whether gRPC still lets callers in.
_LOOK_S = 1.0
#: Seconds that calls get to end when they are cancelled.
_CANCEL_S = 4.0


class Listeners:
    """Every address that the server listens on; nobody is served before `start`.

    `more` are endpoints that no setting names.
    """

    def __init__(
        self, model: str, options: ListenerSettings, more: Sequence[Endpoint] = ()
    ) -> None:
        self._model = model
        self._endpoints = [*options.endpoints, *more]
        connections = ("grpc.max_allowed_incoming_connections", options.max_connections)
        self._options = [*_OPTIONS, connections]
        self._most_calls = options.max_calls
        self._file = AuthorityFile(options.authority) if options.authority else None
        self._certificates: Certificates | None = None
        if options.tls_cert and options.tls_key:
            self._certificates = Certificates(
                options.tls_cert, options.tls_key, options.tls_client_ca
            )
        self._servers: list[grpc.aio.Server] = []
        if self._file:
            _refuse_no_proof(self._file, takes_certificates=options.tls_client_ca is not None)

    def bind(
        self,
        audit: Auditor,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        serve: Callable[[grpc.aio.Server], None],
    ) -> list[Endpoint]:
        """Take every address and return them, with the ports that were chosen.

        Call it while no other thread makes files: it changes the umask for a moment. `interceptors`
        come after authority.

        Raises:
            WeightSyncError: An address is somebody else's, or not of this host.
            RuntimeError: A unix socket cannot be bound.
        """
        bound = []
        for group in self._groups():
            first = AuthorityInterceptor(self.admission(group[0], audit))
            server = grpc.aio.server(
                interceptors=[first, *interceptors],
                options=self._options,
                maximum_concurrent_rpcs=self._most_calls,
            )
            self._servers.append(server)
            serve(generic_only(server))
            bound += [replace(endpoint, address=self._bind(server, endpoint)) for endpoint in group]
        return bound

    def admission(self, endpoint: Endpoint, audit: Auditor) -> Admission:
        return Admission(endpoint, self._file, self._model, audit)

    def tls_context(self) -> ssl.SSLContext | None:
        """Return what such an address encrypts its connections with; None: there is no TLS."""
        return self._certificates.context() if self._certificates is not None else None

    async def start(self) -> None:
        for server in self._servers:
            await server.start()

    async def shut(self) -> str:
        """Wait until gRPC lets nobody in any more, after a fault of its own; return what it was."""
        watches = [asyncio.create_task(_why_shut(server)) for server in self._servers]
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for watch in watches:
                watch.cancel()

    async def close(self, grace_s: float) -> None:
        """Stop listening; calls under way get so many seconds to end, and are then cancelled.

        What has not ended even so is left to the end of the process: gRPC waits for it for ever.
        """
        closing = [asyncio.create_task(server.stop(grace_s)) for server in self._servers]
        if not closing:
            return
        done, left = await asyncio.wait(closing, timeout=grace_s + _CANCEL_S)
        if left:
            logger.warning("calls are still under way %g s after they were cancelled", _CANCEL_S)
        for task in done:
            task.result()

    def _groups(self) -> list[list[Endpoint]]:
        roles = dict.fromkeys(endpoint.role for endpoint in self._endpoints)
        return [[one for one in self._endpoints if one.role is role] for role in roles]

    def _bind(self, server: grpc.aio.Server, endpoint: Endpoint) -> str:
        address = endpoint.address
        if endpoint.is_socket:
            # gRPC itself would replace the socket of a server that lives.
            path = unquote(address.removeprefix("unix:"))
            mask = _PRIVATE_UMASK if endpoint.private else _SOCKET_UMASK
            with claimed(path, "choose another path with --listen"), umask(mask):
                server.add_insecure_port(address)
            return address
        try:
            if self._certificates is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, self._certificates.credentials())
        except RuntimeError as error:
            raise invalid_request(
                f"{address} is in use, or is not an address of this host; choose another with "
                "--listen (with --ingest N, the N ports after it must be free as well)"
            ) from error
        return f"{address.rpartition(':')[0]}:{port}"


async def _why_shut(server: grpc.aio.Server) -> str:
    # Asked again and again: while calls are under way, it tells of a fault only when the time that
    # it was given to end is over. True: that time is over; it serves.
    try:
        while await server.wait_for_termination(_LOOK_S):
            pass
    except Exception as error:  # noqa: BLE001 - whatever has ended gRPC's accept loop
        return f"{type(error).__name__}: {error}"
    return "it has ended"


def _refuse_no_proof(file: AuthorityFile, *, takes_certificates: bool) -> None:
    principals = file.current()
    if not principals.has_tokens and not (principals.has_certificates and takes_certificates):
        raise invalid_request(
            "add tokens to the authority file, or certificate names and --tls-client-ca: without "
            "either, no caller can be authenticated"
        )
