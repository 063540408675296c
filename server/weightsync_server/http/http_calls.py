"""Use cases for an HTTP request, as if its sender had called them by gRPC."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.auth.admission import Admission, Proofs
from weightsync_server.auth.audit import noting
from weightsync_server.auth.caller import AskedRequests, Caller, UseCase, name_of
from weightsync_server.auth.principals import EVERYBODY
from weightsync_server.http.known_hosts import KnownHosts

if TYPE_CHECKING:
    from weightsync_server.http.http_server import HttpRequest


#: Headers that authority asks for, and the one that names the sender's trace.
_PROOFS = ("authorization", "forwarded", "traceparent")
#: Kinds of alternative names in a certificate, as `ssl` calls them, that gRPC tells as well.
_NAMES = ("DNS", "URI", "IP Address", "email")


class HttpCalls:
    """Calls methods of this server for senders of HTTP requests, who must prove that they may.

    `calls` are guarded use cases, by the exact paths of their methods. `fleet` is the fleet that
    this host is a member of; "": none. `hosts` are the names that senders without proof may use.
    """

    def __init__(
        self,
        calls: Mapping[str, UseCase],
        admission: Admission,
        fleet: str = "",
        hosts: KnownHosts | None = None,
    ) -> None:
        self.fleet = fleet
        self._hosts = hosts or KnownHosts()
        self._calls = calls
        self._admission = admission

    def permit(self, sender: HttpRequest, methods: Sequence[str]) -> None:
        """Refuse who may not call all of the methods: half of a verb is done for nobody.

        Refused is also a GET of who has proved nothing and asks by a name that a site may have
        chosen. With every other method browsers send an Origin header.
        """
        principal = self._admission.permit(_proofs(sender), methods, sender.path)
        proved = principal is not EVERYBODY or bool(sender.certificate)
        if proved or sender.method not in ("GET", "HEAD"):
            return
        if host := self._hosts.unknown(sender.values("host")):
            raise WeightSyncError(
                Reason.PERMISSION_DENIED,
                f"ask for this by an IP address or as localhost, not as {host!r}; if that is a "
                "name of this server, start it with --host-names NAME or --authority FILE",
            )

    def knows(self, sender: HttpRequest) -> bool:
        try:
            self._admission.identify(_proofs(sender))
        except WeightSyncError:
            return False
        return True

    def name(self, sender: HttpRequest) -> str:
        """Return who sends a request that was permitted, as shares and rates count."""
        return name_of(self._admission.identify(_proofs(sender)), sender.peer)

    async def call(self, method: str, message: Any, sender: HttpRequest) -> Any:
        """Return the one response of a method.

        `message` is the request, or the async generator of them.
        """
        caller, request = self._enter(method, message, sender)
        try:
            with noting(self._admission.audit, caller):
                return await self._calls[method](caller, request)
        finally:
            if request is not message:
                await message.aclose()

    async def stream(
        self, method: str, message: Any, sender: HttpRequest
    ) -> AsyncGenerator[Any, None]:
        """Yield what a method of several responses answers; closing this cancels the call."""
        caller, request = self._enter(method, message, sender)
        with noting(self._admission.audit, caller):
            async with contextlib.aclosing(self._calls[method](caller, request)) as responses:
                async for response in responses:
                    yield response

    def _enter(self, method: str, message: Any, sender: HttpRequest) -> tuple[Caller, Any]:
        caller = self._admission.admit(_proofs(sender), method)
        if hasattr(message, "__anext__"):
            return caller, AskedRequests(message, caller)
        self._admission.check(caller, message)
        return caller, message


def _proofs(request: HttpRequest) -> Proofs:
    alternatives = request.certificate.get("subjectAltName", ())
    subject = [pair for part in request.certificate.get("subject", ()) for pair in part]
    return Proofs(
        request.peer,
        [(name, value) for name in _PROOFS for value in request.values(name)],
        [value for kind, value in alternatives if kind in _NAMES],
        [value for kind, value in subject if kind == "commonName"],
    )
