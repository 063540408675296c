"""How a call proves who makes it: by the socket it came in on, a bearer token or a certificate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.auth.principals import EVERYBODY, Principal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightsync_server.auth.authority_file import AuthorityFile
    from weightsync_server.auth.endpoints import Endpoint

__all__ = ["Authenticator"]

_SCHEME = "Bearer "
#: The same sentence for every failure: it tells nothing about tokens that exist.
_REMEDY = (
    "this call proves nobody's authority; send one bearer token, which our clients take from "
    "WEIGHTSYNC_TOKEN or WEIGHTSYNC_TOKEN_FILE, or a client certificate, that the server's "
    "authority file knows"
)
#: That only this host can connect says nothing about whom a proxy on this host has let in.
_FORWARDED = (
    "this request was passed on, so that it needs a token, and this server knows none; start it "
    "with --authority FILE, and send a bearer token with the request"
)


class Authenticator:
    """Names the principal of each call that comes in on one endpoint.

    Args:
        endpoint: Where; a socket with a role stands for that role, whoever opens it.
        file: Tokens and certificate names; None: whoever can connect may do everything.

    Attributes:
        role: Of the endpoint.
    """

    def __init__(self, endpoint: Endpoint, file: AuthorityFile | None) -> None:
        self.role = endpoint.role
        self._file = file
        self._given: Principal | None = None
        if endpoint.role is not None:
            self._given = Principal(f"{endpoint.role}-socket", frozenset({endpoint.role}))
        elif file is None:
            self._given = EVERYBODY

    def identify(self, context: Any) -> Principal:
        """Return who calls.

        Raises:
            WeightSyncError: UNAUTHENTICATED.
        """
        if self._given is EVERYBODY and _is_forwarded(context):
            raise WeightSyncError(Reason.UNAUTHENTICATED, _FORWARDED)
        if self._given is not None:
            return self._given
        principal = self._proved(context)
        if principal is None:
            raise WeightSyncError(Reason.UNAUTHENTICATED, _REMEDY)
        return principal

    def _proved(self, context: Any) -> Principal | None:
        if self._file is None:
            return None
        principals = self._file.current()
        headers = [value for key, value in context.invocation_metadata() if key == "authorization"]
        if not headers:
            return principals.by_certificate(_certificate_names(context.auth_context()))
        # A header that proves nothing is refused, whatever the certificate says.
        if len(headers) > 1 or not isinstance(headers[0], str):
            return None
        if not headers[0].startswith(_SCHEME):
            return None
        return principals.by_token(headers[0].removeprefix(_SCHEME))


def _is_forwarded(context: Any) -> bool:
    # RFC 7239.
    return any(key == "forwarded" for key, _ in context.invocation_metadata())


def _certificate_names(proofs: dict[str, Sequence[bytes]]) -> list[str]:
    # RFC 6125: the common name counts only where there is no alternative name.
    names = proofs.get("x509_subject_alternative_name") or proofs.get("x509_common_name") or ()
    return [name.decode(errors="replace") for name in names]
