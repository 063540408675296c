"""Files for TLS to another server, checked before they are used."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.auth.secret_files import read_private

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["ClientTls"]


@dataclass(frozen=True)
class ClientTls:
    """Files for TLS to another server, PEM.

    Attributes:
        ca: Authorities that its certificates come from; None: those of this host.
        certificate: The chain that this server shows; None: it shows none.
        key: Its key, which others may not read.
        peer: What that server is called in sentences.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    peer: str = "the other server"

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files.

        Raises:
            WeightSyncError: REQUEST_INVALID; one is missing, cannot be read or does not fit.
        """
        peer = self.peer
        if (self.certificate is None) != (self.key is None):
            raise _invalid(
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
            raise _invalid(
                f"{self.peer}'s CA {self.ca} holds no certificate in PEM; name another"
            ) from None
        if self.certificate and self.key:
            try:
                # The password keeps OpenSSL from asking for one at the terminal.
                context.load_cert_chain(self.certificate, self.key, password="")
            except ssl.SSLError:
                raise _invalid(
                    f"{self.certificate} and {self.key} are no certificate in PEM with its key, "
                    "without a password; name a pair that fits"
                ) from None


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _invalid(f"{what} {path} cannot be read: {error.strerror}") from None


def _invalid(sentence: str) -> WeightSyncError:
    return WeightSyncError(Reason.REQUEST_INVALID, sentence)
