"""How a client proves who it is, and how the server proves itself to the client."""

from __future__ import annotations

import os
import ssl
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import grpc

from weightsync_client.errors import invalid

#: Environment variable to field of `Access`, and what it holds.
VARIABLES = {
    "WEIGHTSYNC_TOKEN": ("token", "bearer token"),
    "WEIGHTSYNC_TOKEN_FILE": ("token_file", "file that holds the token"),
    "WEIGHTSYNC_TLS_CA": ("tls_ca", "PEM of the authorities of the server's certificate"),
    "WEIGHTSYNC_TLS_CERT": ("tls_cert", "PEM of this client's certificate"),
    "WEIGHTSYNC_TLS_KEY": ("tls_key", "PEM of its key"),
}


@dataclass(frozen=True, kw_only=True)
class Access:
    """Token and certificates; nothing of it is ever shown. The default is none of it.

    Attributes:
        token: Bearer token.
        token_file: File that holds it instead, closed to other users; read again for each call,
            so that a token can be replaced while the client runs.
        tls_ca: PEM file of the authorities that must have signed the server's certificate; given,
            TCP addresses are spoken to by TLS.
        tls_cert: PEM file of this client's certificate; needs tls_key and tls_ca.
        tls_key: PEM file of its key.
        credentials: Instead of the three: credentials that gRPC made.
    """

    token: str = field(default="", repr=False)
    token_file: str | os.PathLike[str] = ""
    tls_ca: str | os.PathLike[str] = ""
    tls_cert: str | os.PathLike[str] = ""
    tls_key: str | os.PathLike[str] = ""
    credentials: grpc.ChannelCredentials | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.token and self.token_file:
            raise invalid("both a token and a token file are given; give one of them")
        if self.credentials and (self.tls_ca or self.tls_cert or self.tls_key):
            raise invalid("both credentials and TLS files are given; give one of them")
        if bool(self.tls_cert) != bool(self.tls_key) or (self.tls_cert and not self.tls_ca):
            raise invalid("tls_cert and tls_key go together, and need tls_ca; give all of them")

    @classmethod
    def from_environment(cls) -> Self:
        """Return what the variables in `VARIABLES` say; unset or empty ones count as not given."""
        given = {name: os.environ.get(variable, "") for variable, (name, _) in VARIABLES.items()}
        if not given["tls_ca"]:
            # Where a server gets its settings by variables, these two are its own.
            given["tls_cert"] = given["tls_key"] = ""
        return cls(**given)  # type: ignore[arg-type]  # text for each of these fields

    def bearer(self) -> str:
        """Return the token of this moment; empty: none.

        Raises:
            ClientError: REQUEST_INVALID; it cannot be read, or is none.
        """
        token = self.token or (self._from_file(Path(self.token_file)) if self.token_file else "")
        if not (token.isascii() and token.isprintable()) or " " in token:
            raise invalid("the token holds spaces or control characters; copy it again")
        return token

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Return the credentials for TLS; None: plain text.

        Raises:
            ClientError: REQUEST_INVALID; a file cannot be used.
        """
        if not self.tls_ca:
            return self.credentials
        roots = _read(self.tls_ca, "the CA file")
        key = chain = None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(cadata=roots.decode("ascii"))
        except (ssl.SSLError, ValueError):
            raise invalid(f"{self.tls_ca} holds no PEM certificates; name another") from None
        if self.tls_cert:
            key, chain = _read(self.tls_key, "the key"), _read(self.tls_cert, "the certificate")
            try:
                # The password keeps OpenSSL from asking for one at the terminal.
                context.load_cert_chain(self.tls_cert, self.tls_key, password="")
            except (ssl.SSLError, OSError):
                raise invalid(
                    f"{self.tls_cert} and {self.tls_key} are not a PEM certificate and its key, "
                    "without a password; name a PEM certificate and its key"
                ) from None
        return grpc.ssl_channel_credentials(roots, key, chain)

    def _from_file(self, path: Path) -> str:
        data = _read(path, "the token file")
        if path.stat().st_mode & stat.S_IRWXO:
            raise invalid(f"the token file {path} is open to other users; set its mode to 0600")
        token = data.decode("ascii", errors="replace").strip()
        if not token:
            raise invalid(f"the token file {path} is empty; write the token into it")
        return token


def _read(path: str | os.PathLike[str], what: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise invalid(f"{what} {os.fspath(path)} cannot be read: {error.strerror}") from None
