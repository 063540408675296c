"""TLS of the server: certificates are read again when their files change."""

from __future__ import annotations

import logging
import ssl
from typing import TYPE_CHECKING

import grpc

from weightsync.errors import WeightSyncError
from weightsync_server.auth.secret_files import read_private, refused, stamp

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Certificates"]

logger = logging.getLogger(__name__)


class Certificates:
    """The server's certificate, its key and whose client certificates it takes.

    A connection gets what the files hold when it is made. While they hold no pair that fits, as
    in the midst of a change, it gets the last one that did.

    Args:
        certificate: The server's chain, PEM.
        key: Its key, PEM.
        client_ca: Authorities whose client certificates are taken, and then demanded, PEM.

    Raises:
        WeightSyncError: REQUEST_INVALID; they cannot be used.
    """

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None) -> None:
        self._certificate, self._key, self._client_ca = certificate, key, client_ca
        self._stamps = self._look()
        self._context: ssl.SSLContext
        self._configuration = self._read()

    def credentials(self) -> grpc.ServerCredentials:
        """Return what a gRPC server listens with."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration,
            self._current,
            require_client_authentication=self._client_ca is not None,
        )

    def context(self) -> ssl.SSLContext:
        """Return what another server than gRPC's listens with."""
        return self._context

    def _current(self) -> grpc.ServerCertificateConfiguration:
        # gRPC asks from threads of its own, at each handshake.
        now = self._look()
        if now != self._stamps:
            try:
                self._configuration = self._read()
                logger.info("read %s again", self._certificate)
            except WeightSyncError as error:
                logger.error("the certificate from before stays: %s", error)  # noqa: TRY400 - the sentence says it all
            self._stamps = now
        return self._configuration

    def _look(self) -> tuple[object, ...]:
        paths = (self._certificate, self._key, self._client_ca)
        return tuple(path and stamp(path) for path in paths)

    def _read(self) -> grpc.ServerCertificateConfiguration:
        key = read_private(self._key, "the TLS key")
        chain = _read(self._certificate, "the TLS certificate")
        roots = _read(self._client_ca, "the client CA") if self._client_ca else None
        self._context = self._checked(roots)
        return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=roots)

    def _checked(self, roots: bytes | None) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # The password keeps OpenSSL from asking for one at the terminal.
            context.load_cert_chain(self._certificate, self._key, password="")
        except (ssl.SSLError, OSError) as error:
            raise refused(
                f"{self._certificate} and {self._key} are no PEM certificate and its key "
                f"without a password ({_why(error)})"
            ) from None
        try:
            if roots is not None:
                context.load_verify_locations(cadata=roots.decode("ascii"))
                context.verify_mode = ssl.CERT_REQUIRED
        except (ssl.SSLError, ValueError) as error:
            raise refused(f"{self._client_ca} holds no PEM certificates ({_why(error)})") from None
        # Called at each handshake, whatever name the client asks for.
        context.sni_callback = self._switch
        return context

    def _switch(self, connection: ssl.SSLObject, _name: str | None, _: ssl.SSLContext) -> None:
        self._current()
        connection.context = self._context


def _why(error: Exception) -> str:
    return str(getattr(error, "reason", "") or getattr(error, "strerror", "") or "not ASCII")


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise refused(f"{what} {path} cannot be read: {error.strerror}") from None
