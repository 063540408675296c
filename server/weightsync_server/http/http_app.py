"""Calls over HTTP: who may have what done, by which path, and what is answered otherwise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError, invalid_request
from weightsync_server.http import http_messages
from weightsync_server.http.http_messages import BODY_BYTES, Verb, read_fields
from weightsync_server.http.http_server import HttpEndpoint, HttpReply, HttpRequest
from weightsync_server.ops.os_errors import to_refusal

if TYPE_CHECKING:
    import ssl

    from weightsync_server.http.extension_points import HttpVerbs
    from weightsync_server.http.http_calls import HttpCalls

logger = logging.getLogger(__name__)


#: Seconds for the last answers when the server stops.
_LAST_S = 5.0


class HttpApi:
    """Answers verbs over HTTP from now on, whatever is wrong with a request.

    A `port` of 0 is any free one. Connections are encrypted with `tls`, unless that is None.
    `calls` know who may have what done. `sources` have verbs, and are closed with this; `others`
    are more verbs, by path. `on_fault` is called for each fault.

    Raises:
        OSError: The address cannot be bound.
        WeightSyncError: Two answer the same path.
    """

    def __init__(
        self,
        host: str,
        port: int,
        tls: ssl.SSLContext | None,
        calls: HttpCalls,
        sources: Sequence[HttpVerbs],
        others: Sequence[Mapping[str, Verb]],
        on_fault: Callable[[], None],
    ) -> None:
        self._calls = calls
        self._sources = sources
        self._verbs: dict[str, Verb] = {}
        for verbs in (*(each.verbs for each in sources), *others):
            if both := sorted(self._verbs.keys() & verbs.keys()):
                raise invalid_request(
                    f"give one of the extensions another path: two answer {', '.join(both)}"
                )
            self._verbs |= verbs
        self._on_fault = on_fault
        self._endpoint = HttpEndpoint(
            self._answer,
            host,
            port,
            name="http-api",
            max_body=self._most_bytes,
            refuse=self._refuse_body,
            is_long=self._is_long,
            tls=tls,
        )
        self.port: int = self._endpoint.port
        shown = f"[{host}]" if ":" in host and not host.startswith("[") else host
        self.url = f"{'https' if tls else 'http'}://{shown}:{self.port}"

    async def drain(self, grace_s: float) -> None:
        """Let nobody in any more; what is under way gets so many seconds, then it ends."""
        self._endpoint.close()
        for each in self._sources:
            await each.close(grace_s)
        await self._endpoint.drain(min(grace_s, _LAST_S))

    async def _answer(self, request: HttpRequest) -> HttpReply:
        try:
            verb = self._find_verb(request)
            if isinstance(verb, HttpReply):
                return verb
            return await verb.run(request, read_fields(request, may_be_empty=verb.may_be_empty))
        except WeightSyncError as error:
            return http_messages.refusal(error)
        except Exception as error:
            logger.exception("%s failed", request.path[:64])
            refusal = to_refusal(error, request.path[:64])
            if refusal.reason is Reason.FAULT:
                self._on_fault()
            return http_messages.refusal(refusal)

    def _find_verb(self, request: HttpRequest) -> Verb | HttpReply:
        """Return what a request is for, by its head alone, or that there is no such thing."""
        verb = self._verbs.get(request.path)
        if request.values("origin"):
            # A page of any site may have a browser on this host post to a port of this host.
            raise WeightSyncError(
                Reason.PERMISSION_DENIED, "browsers are not answered; ask without an Origin header"
            )
        if verb is None or not verb.is_public:
            self._calls.permit(request, verb.needs if verb is not None else ())
        if verb is None:
            return http_messages.no_route(self._verbs)
        if request.method != verb.method and (request.method, verb.method) != ("HEAD", "GET"):
            return http_messages.no_method(request.path, verb.method)
        return verb

    def _refuse_body(self, head: HttpRequest, status: HTTPStatus, sentence: str) -> HttpReply:
        try:
            found = self._find_verb(head)
        except WeightSyncError as error:
            return http_messages.refusal(error)
        return (
            found if isinstance(found, HttpReply) else http_messages.wrong_request(status, sentence)
        )

    def _most_bytes(self, head: HttpRequest) -> int:
        """Return how long the body after a head may be; strangers have no large ones read."""
        verb = self._verbs.get(head.path)
        if verb is None or verb.body_bytes <= BODY_BYTES or not self._calls.knows(head):
            return BODY_BYTES
        return verb.body_bytes

    def _is_long(self, request: HttpRequest) -> bool:
        verb = self._verbs.get(request.path)
        return verb is not None and verb.is_long
