"""The status page: its files, and the stream of what it shows."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from weightsync.errors import EXPLANATIONS, Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.auth.caller import Caller
from weightsync_server.auth.principals import EVERYBODY
from weightsync_server.auth.roles import RULES
from weightsync_server.catalog.version_events import VersionChanged
from weightsync_server.http.http_messages import (
    COMMENT,
    SILENCE_S,
    Verb,
    error_document,
    refusal,
    refuse_unknown,
)
from weightsync_server.http.http_server import HttpReply, HttpRequest
from weightsync_server.http.read_verbs import plain_document
from weightsync_server.ops.tasks import cancel_tasks, in_thread
from weightsync_server.usecases import serving_calls, version_calls
from weightsync_server.usecases.methods import (
    GET_FLEET_STATUS,
    GET_STATUS,
    LIST_APPLIES,
    LIST_VERSIONS,
)

if TYPE_CHECKING:
    from weightsync_server.http.http_calls import HttpCalls
    from weightsync_server.usecases.core import ServerCore

logger = logging.getLogger(__name__)

EVENTS = "/v1/weightsync/events"
_FOLDER = Path(__file__).with_name("page_files")
#: By path: the file and its kind.
_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
#: Nothing of another origin is loaded, nothing in the text of the page runs, no site may frame it.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; trusted-types 'none'; "
    "require-trusted-types-for 'script'"
)
_HEADERS = (
    ("Content-Security-Policy", _POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-cache"),
)
_NEEDS = (GET_STATUS, LIST_VERSIONS, LIST_APPLIES, GET_FLEET_STATUS)
#: Who reads for all pages; each of them was let in by itself.
_READER = Caller(EVERYBODY, GET_STATUS, RULES[GET_STATUS], "")
#: Pages at once, those of one caller, and how many versions and applies they show.
_MOST, _SHARE, _VERSIONS, _APPLIES = 32, 8, 200, 20
#: Seconds between two looks, between two at the fleet, which ask its coordination, and until a page
#: that is one too many may try again.
_LOOK_S, _FLEET_S, _AGAIN_S = 1.0, 3.0, 10.0


class _Part(NamedTuple):
    """A part of what pages show, as an event; `revision` rises with each change of any."""

    revision: int
    message: Any
    event: bytes


class StatusPage:
    """Answers the status page to any browser, and what it shows to callers that may read that.

    The files hold no data. The data is that of GetStatus, ListVersions, ListApplies and
    GetFleetStatus, in one stream that sends what has changed. It is read once a second at most,
    however many pages are open, and not at all while there is none. No caller can keep the others
    from it: a caller is a principal, or a host where nobody proves who asks.
    """

    def __init__(self, calls: HttpCalls, core: ServerCore) -> None:
        self._calls, self._core = calls, core
        files = {
            path: Verb("GET", (), _file(name, kind), is_public=True)
            for path, (name, kind) in _FILES.items()
        }
        self.verbs: Mapping[str, Verb] = {**files, EVENTS: Verb("GET", _NEEDS, self._open)}
        self._followers: set[_Follower] = set()
        self._looking: list[asyncio.Task[None]] = []
        self._changed, self._revision = asyncio.Event(), 0
        self.parts: dict[str, _Part] = {}
        self.ended = False

    async def close(self, grace_s: float) -> None:  # noqa: ARG002 - nothing here is worth a wait
        """End every stream at once: its page opens another."""
        self.ended = True
        self._wake()
        await cancel_tasks(*self._looking)

    async def _open(self, request: HttpRequest, fields: Mapping[str, Any]) -> HttpReply:
        refuse_unknown(fields, ())
        # Counts into the caller's rate and into the metrics, as any look does.
        await self._calls.call(GET_STATUS, pb.GetStatusRequest(), request)
        if len(self._followers) >= _MOST:
            raise WeightSyncError(
                Reason.LIMIT_EXCEEDED,
                f"close a status page that is open elsewhere: {_MOST} are open, which is the most",
                retry_after_s=_AGAIN_S,
            )
        who = self._calls.name(request)
        if sum(one.who == who for one in self._followers) >= _SHARE:
            return refusal(_over_share(who), HTTPStatus.TOO_MANY_REQUESTS)
        follower = _Follower(self, who, lambda: self._calls.permit(request, _NEEDS))
        if not self._followers:
            self._start()
        self._followers.add(follower)
        # nginx would keep events until it has some kilobytes of them.
        headers = (*_HEADERS, ("X-Accel-Buffering", "no"))
        return HttpReply(HTTPStatus.OK, b"", "text/event-stream", headers, follower)

    def leave(self, follower: _Follower) -> None:
        if self._followers == {follower}:
            self._look_no_more()
        self._followers.discard(follower)

    def _look_no_more(self) -> None:
        for task in self._looking:
            task.cancel()

    async def wait(self) -> bool:
        """Return whether anything has changed before the silence became too long."""
        try:
            async with asyncio.timeout(SILENCE_S):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _start(self) -> None:
        self.parts.clear()
        looks = [self._look()]
        if self._core.engines.fleet is not None:
            looks.append(self._look_at_fleet())
        self._looking = [asyncio.create_task(look, name="status-page") for look in looks]
        for task in self._looking:
            task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            logger.error("the status page could not be read", exc_info=task.exception())
            # Their pages open others, for which all of it is begun anew.
            self._look_no_more()
            followers, self._followers = self._followers, set()
            for follower in followers:
                follower.end()
            self._wake()

    async def _look(self) -> None:
        changes: list[VersionChanged] = []
        bus = self._core.versions.model.events
        bus.on(VersionChanged, changes.append)
        try:
            await self._note("remedies", {key: each.remedy for key, each in EXPLANATIONS.items()})
            versions = await self._list_versions()
            while True:
                await self._note("status", self._status())
                if changes:
                    changes.clear()
                    versions = await self._list_versions()
                await self._note("versions", versions)
                asked = pb.ListAppliesRequest(page_size=_APPLIES)
                applies = await serving_calls.list_applies(self._core, _READER, asked)
                await self._note("applies", applies)
                await asyncio.sleep(_LOOK_S)
        finally:
            bus.off(VersionChanged, changes.append)

    def _status(self) -> pb.GetStatusResponse:
        """Return the status without what changes by itself: pages have the times it is made of."""
        status = self._core.status()
        status.ClearField("uptime")
        for model in status.models:
            model.ClearField("live_age")
            model.ClearField("newest_age")
            _clear_times(model)
            for engine in (model.engine, *model.engines):
                _clear_times(engine)
        return status

    async def _list_versions(self) -> pb.ListVersionsResponse:
        name = self._core.versions.model.table.name
        asked = pb.ListVersionsRequest(model=name, page_size=_VERSIONS)
        return await version_calls.list_versions(self._core, _READER, asked)

    async def _look_at_fleet(self) -> None:
        asked = pb.GetFleetStatusRequest()
        while True:
            try:
                fleet = await serving_calls.get_fleet_status(self._core, _READER, asked)
            except WeightSyncError as error:
                await self._note("fleet", error_document(error))
            else:
                fleet.ClearField("read_age")
                await self._note("fleet", fleet)
            await asyncio.sleep(_FLEET_S)

    async def _note(self, name: str, message: Any) -> None:
        """Have a part sent to every page, if it is another than before."""
        part = self.parts.get(name)
        if part is None or part.message != message:
            # In a thread: 200 versions take 12 ms, by which no apply may be longer.
            event = await in_thread(_encoded, name, message)
            self._revision += 1
            self.parts[name] = _Part(self._revision, message, event)
            self._wake()


class _Follower:
    """The stream of one page: each part as it is now, then each as it becomes, then it ends.

    One that reads slowly is sent fewer states, not older ones. `permit` raises once its caller,
    `who`, may read no more; the error is the last event then.
    """

    def __init__(self, page: StatusPage, who: str, permit: Callable[[], None]) -> None:
        self.who, self._page, self._permit = who, page, permit
        self._sent = 0
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while not self._ended and not self._page.ended:
            try:
                self._permit()
            except WeightSyncError as error:
                self._ended = True
                return _encoded("refused", error_document(error))
            later = [part for part in self._page.parts.values() if part.revision > self._sent]
            if later:
                part = min(later)
                self._sent = part.revision
                return part.event
            if not await self._page.wait():
                return COMMENT
        raise StopAsyncIteration

    def end(self) -> None:
        self._ended = True

    async def aclose(self) -> None:
        self._ended = True
        self._page.leave(self)


def _clear_times(one: pb.ModelStatus | pb.EngineStatus) -> None:
    if one.HasField("running_apply"):
        one.running_apply.ClearField("took")
        one.running_apply.ClearField("in_phase")


def _over_share(who: str) -> WeightSyncError:
    return WeightSyncError(
        Reason.LIMIT_EXCEEDED,
        f"close one of the {_SHARE} status pages that {who} has open, which is the most for one "
        "caller; each token has its own share",
        retry_after_s=_AGAIN_S,
    )


def _encoded(name: str, message: Any) -> bytes:
    document = message if isinstance(message, dict) else plain_document(message)
    return f"event: {name}\ndata: {json.dumps(document)}\n\n".encode()


def _file(name: str, kind: str) -> Callable[[HttpRequest, Mapping[str, Any]], Awaitable[HttpReply]]:
    reply = HttpReply(HTTPStatus.OK, (_FOLDER / name).read_bytes(), kind, _HEADERS)

    async def answer(_: HttpRequest, __: Mapping[str, Any]) -> HttpReply:
        return reply

    return answer
