"""How a call proves who makes it, and who may call what: the one way in of every listener."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.auth.caller import Caller, RejectedCall, denied
from weightsync_server.auth.principals import EVERYBODY, AuthorityFile, Principal
from weightsync_server.auth.roles import RULES, Endpoint, Role
from weightsync_server.ops import traces

_SCHEME = "Bearer "
#: The same sentence for every failure: it tells nothing about tokens that exist.
_REMEDY = (
    "no valid token or client certificate: send `authorization: Bearer ...` with one token "
    "(weightsync's clients take it from WEIGHTSYNC_TOKEN or WEIGHTSYNC_TOKEN_FILE), or a client "
    "certificate, that the server's authority file lists"
)
#: That only this host can connect says nothing about whom a proxy on this host has let in.
_FORWARDED = (
    "start this server with --authority FILE, and send a bearer token with the request: a "
    "forwarded request needs a token, and this server has none configured"
)


class Proofs(NamedTuple):
    """What a call brings to show who makes it.

    `headers` have lower-case names. TLS has verified the client certificate of the names.
    """

    peer: str = ""
    headers: Sequence[tuple[str, str | bytes]] = ()
    alternative_names: Sequence[str] = ()
    common_names: Sequence[str] = ()


class Auditor(Protocol):
    """Is told of every end; `weightsync_server.auth.audit.Audit` writes it down."""

    def refuse(self, error: WeightSyncError, attempt: RejectedCall, times: int = 1) -> None:
        """A call was refused at the door, or so many alike were."""

    def write(self, caller: Caller, outcome: str) -> None:
        """A call that had begun its work has ended."""


class Admission:
    """Admits the calls of one listener: of principals that have the role, and nobody else's.

    A socket with a role stands for it, whichever process opens it. Without a `file` of tokens and
    certificate names, any client that can connect may do everything. A principal without authority
    over `model` has none here.
    """

    def __init__(
        self, endpoint: Endpoint, file: AuthorityFile | None, model: str, audit: Auditor
    ) -> None:
        self.model = model
        self.audit = audit
        self._role = endpoint.role
        self._file = file
        self._given: Principal | None = None
        if endpoint.role is not None:
            self._given = Principal(f"{endpoint.role}-socket", frozenset({endpoint.role}))
        elif file is None:
            self._given = EVERYBODY

    def identify(self, proofs: Proofs) -> Principal:
        if self._given is EVERYBODY and _is_forwarded(proofs):
            raise WeightSyncError(Reason.UNAUTHENTICATED, _FORWARDED)
        if self._given is not None:
            return self._given
        principal = self._proved(proofs)
        if principal is None:
            raise WeightSyncError(Reason.UNAUTHENTICATED, _REMEDY)
        return principal

    def permit(self, proofs: Proofs, methods: Sequence[str], name: str) -> Principal:
        """Return who calls, if it may call all of the methods; the audit calls them `name`."""
        with self._refusing(RejectedCall("", name, proofs.peer)):
            principal = self.identify(proofs)
        with self._refusing(RejectedCall(principal.name, name, proofs.peer)):
            for method in methods:
                self._check_rule(principal, method)
        return principal

    def admit(self, proofs: Proofs, method: str, left_s: float | None = None) -> Caller:
        """Return the caller of a method, an exact path, if it may call it."""
        traces.take_over(_traceparent(proofs))
        principal = self.permit(proofs, (method,), method)
        deadline = None if left_s is None else clock.monotonic() + left_s
        return Caller(principal, method, RULES[method], proofs.peer, self._role, deadline)

    def check(self, caller: Caller, request: Any) -> None:
        """Refuse what a request asks beyond the caller's authority."""
        with self._refusing(RejectedCall(caller.principal.name, caller.method, caller.peer)):
            caller.ask(request)

    @contextlib.contextmanager
    def _refusing(self, attempt: RejectedCall) -> Iterator[None]:
        try:
            yield
        except WeightSyncError as error:
            # The path is text from outside: cut.
            method = attempt.method.rpartition("/")[2][:64]
            self.audit.refuse(error, attempt._replace(method=method))
            raise

    def _check_rule(self, principal: Principal, method: str) -> None:
        if not principal.covers(self.model):
            raise denied(f"{principal.name} has no authority over the model of this server")
        rule = RULES.get(method)
        if rule is None:
            raise WeightSyncError(
                Reason.NOT_SUPPORTED, "this server has no such method; see its proto"
            )
        if not rule.allows(principal.roles):
            needed = " or ".join(sorted(rule.roles | {Role.ADMIN}))
            raise denied(f"{principal.name} may not call {method}; it takes role {needed}")

    def _proved(self, proofs: Proofs) -> Principal | None:
        if self._file is None:
            return None
        principals = self._file.current()
        headers = [value for key, value in proofs.headers if key == "authorization"]
        if not headers:
            # RFC 6125: the common name counts only where there is no alternative name.
            return principals.by_certificate(proofs.alternative_names or proofs.common_names)
        # A header that proves nothing is refused, whatever the certificate says.
        if len(headers) > 1 or not isinstance(headers[0], str):
            return None
        if not headers[0].startswith(_SCHEME):
            return None
        return principals.by_token(headers[0].removeprefix(_SCHEME))


def _traceparent(proofs: Proofs) -> str:
    """Return what names the caller's trace; "": it has none, or names several."""
    found = [value for key, value in proofs.headers if key == "traceparent"]
    return str(found[0]) if len(found) == 1 else ""


def _is_forwarded(proofs: Proofs) -> bool:
    # RFC 7239.
    return any(key == "forwarded" for key, _ in proofs.headers)
