"""TLS: the server's certificates, files for TLS to another server, and files that hold secrets."""

from __future__ import annotations

import logging
import os
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

import grpc

from weightsync.errors import WeightSyncError, invalid_request

logger = logging.getLogger(__name__)


_MAX_BYTES = 1 << 20
_FORBIDDEN = stat.S_IWGRP | stat.S_IWOTH | stat.S_IROTH


def stamp(path: Path) -> tuple[int, ...] | None:
    """Return the stamp of what a path names now, links followed; None: nothing that is there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def read_private(path: Path, what: str) -> bytes:
    """Return the content of a file that only its owner changes and others cannot read.

    `path` may be a link. `what` is the subject of a sentence. Raises REQUEST_INVALID if the file
    cannot be read, or its owner or mode is too open.
    """
    try:
        # O_NONBLOCK: a pipe in its place must not make the server wait.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise invalid_request(f"{what} {path} cannot be read: {error.strerror}") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
            raise invalid_request(f"{what} {path} is not a file of at most 1 MiB; name another")
        if status.st_mode & _FORBIDDEN:
            raise invalid_request(
                f"{what} {path} has mode {stat.S_IMODE(status.st_mode):04o}, so others may read or "
                "change it; set it to 0600 or 0640"
            )
        if status.st_uid not in (0, os.geteuid()):
            raise invalid_request(
                f"make root or this server's user the owner of {what} {path}: it belongs to user "
                f"{status.st_uid}"
            )
        return os.read(fd, _MAX_BYTES)
    finally:
        os.close(fd)


class Certificates:
    """The server's certificate, its key and whose client certificates it takes.

    A connection gets what the files hold when it is made. While they hold no pair that fits, as in
    the midst of a change, it gets the last one that did. All are PEM; `certificate` is the chain.
    With `client_ca`, client certificates are demanded.
    """

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None) -> None:
        self._certificate, self._key, self._client_ca = certificate, key, client_ca
        self._stamps = self._look()
        self._context: ssl.SSLContext
        self._configuration = self._read()

    def credentials(self) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(
            self._configuration,
            self._current,
            require_client_authentication=self._client_ca is not None,
        )

    def context(self) -> ssl.SSLContext:
        return self._context

    def _current(self) -> grpc.ServerCertificateConfiguration:
        # gRPC asks from threads of its own, at each handshake.
        now = self._look()
        if now != self._stamps:
            try:
                self._configuration = self._read()
                logger.info("read %s again", self._certificate)
            except WeightSyncError as error:
                logger.error("the previous certificate stays in use: %s", error)  # noqa: TRY400 - the sentence says it all
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
            raise invalid_request(
                f"{self._certificate} and {self._key} are not a PEM certificate with its key, "
                f"without a password ({_why(error)})"
            ) from None
        try:
            if roots is not None:
                context.load_verify_locations(cadata=roots.decode("ascii"))
                context.verify_mode = ssl.CERT_REQUIRED
        except (ssl.SSLError, ValueError) as error:
            raise invalid_request(
                f"{self._client_ca} holds no PEM certificates ({_why(error)})"
            ) from None
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
        raise invalid_request(f"{what} {path} cannot be read: {error.strerror}") from None


@dataclass(frozen=True)
class ClientTls:
    """PEM files for TLS to another server, which sentences call `peer`.

    Without a `ca`, the authorities of this host count; without a `certificate`, none is shown.
    Others may not read the `key`.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    peer: str = "the other server"

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files; REQUEST_INVALID: one is missing, cannot be read or does not fit."""
        peer = self.peer
        if (self.certificate is None) != (self.key is None):
            raise invalid_request(
                f"a client certificate for {peer} needs its key, and a key its certificate"
            )
        credentials = grpc.ssl_channel_credentials(
            _read(self.ca, f"{peer}'s CA") if self.ca else None,
            read_private(self.key, f"the key for {peer}") if self.key else None,
            _read(self.certificate, f"the certificate for {peer}") if self.certificate else None,
        )
        self._check()
        return credentials

    def _check(self) -> None:
        # gRPC takes anything, and then connects to nobody.
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except ssl.SSLError:
            raise invalid_request(
                f"{self.peer}'s CA {self.ca} holds no PEM certificate; name another file"
            ) from None
        if self.certificate and self.key:
            try:
                # The password keeps OpenSSL from asking for one at the terminal.
                context.load_cert_chain(self.certificate, self.key, password="")
            except ssl.SSLError:
                raise invalid_request(
                    f"name a PEM certificate and its key, without a password: {self.certificate} "
                    f"and {self.key} are not such a pair"
                ) from None
