"""/update_weights and /pause: a folder is pushed as a version, which becomes live."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError, invalid_request
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.auth import PUSH_WEIGHTS
from weightsync_server.engine.applier import refuse_member
from weightsync_server.extensions.vllm_verbs.weight_folder import (
    CastFolder,
    facts_of,
    folder_facts,
    open_folder,
)
from weightsync_server.http.http_calls import HttpCalls
from weightsync_server.http.http_server import HttpRequest
from weightsync_server.ops.tasks import cancel_tasks, in_thread
from weightsync_server.push import ChunkView, Message
from weightsync_server.usecases.methods import (
    ABORT_PUSH,
    APPLY_VERSION,
    BEGIN_PUSH,
    GET_ENGINE_LAYOUT,
)
from weightsync_server.usecases.version_calls import layout_parts

if TYPE_CHECKING:
    from weightsync_server.extensions.vllm_verbs.weight_folder import Files


logger = logging.getLogger(__name__)


#: Bytes of one chunk.
_CHUNK_BYTES = 2 << 20


async def push_folder(
    calls: HttpCalls, sender: HttpRequest, model: str, sent: CastFolder
) -> pb.CommitPushResponse:
    """Return when the folder is a committed version, the next one; a push that fails leaves none.

    `calls` are the server's methods. The folder is pushed for `sender`.

    Raises:
        WeightSyncError: As of BeginPush, PushWeights and CommitPush.
    """
    begin = pb.BeginPushRequest(
        model=model,
        kind=pb.PUSH_KIND_FULL,
        total_bytes=sent.layout.size,
        shard_count=len(sent.layout.shards),
        metadata={"weight_dir": sent.folder.path},
    )
    push_id = (await calls.call(BEGIN_PUSH, begin, sender)).push_id
    try:
        reply = await calls.call(PUSH_WEIGHTS, _messages(push_id, sent), sender)
    except BaseException:
        # What it failed with is told; that it has ended already is no news.
        with contextlib.suppress(WeightSyncError):
            await calls.call(ABORT_PUSH, pb.AbortPushRequest(push_id=push_id), sender)
        raise
    done: pb.CommitPushResponse = reply.commit
    return done


async def _messages(push_id: str, sent: CastFolder) -> AsyncIterator[Message]:
    yield pb.PushWeightsRequest(join=pb.JoinPush(push_id=push_id))
    count = len(sent.layout.shards)
    for shard in range(count):
        for part in layout_parts(sent.layout, shard):
            yield pb.PushWeightsRequest(layout=part)
            await asyncio.sleep(0)
    for index in range(count):
        async for begin, block in sent.blocks(index):
            for at in range(0, len(block), _CHUNK_BYTES):
                yield ChunkView(index, begin + at, block[at : at + _CHUNK_BYTES])
                # What comes by gRPC lets others have their turn between two messages, too.
                await asyncio.sleep(0)
    sent.folder.check_unchanged()
    commit = pb.CommitPushRequest(shard_count=count, cast_tensors=sent.cast)
    yield pb.PushWeightsRequest(commit=commit)


#: Senders that may wait for one update; they leave room for who asks how it stands.
_MOST_WAITING = 64


class WeightUpdates:
    """Pushes folders and applies them. One whose sender leaves goes on to its end.

    `calls` are the server's methods. A folder must lie below one of `roots`, which are absolute.
    """

    def __init__(self, calls: HttpCalls, model: str, roots: Sequence[Path]) -> None:
        self._calls = calls
        self._model = model
        self._roots = roots
        self._path = ""
        #: Of what the engine was last known to hold, and the dtypes of its tensors, by name.
        self._signature, self._dtypes = "", dict[str, str]()
        #: What was read of it, once that has begun.
        self._files: Files | None = None
        self._task: asyncio.Task[dict[str, Any]] | None = None
        self._waiting = 0

    async def run(
        self, path: str, pause: pb.PauseOptions | None, sender: HttpRequest
    ) -> dict[str, Any]:
        """Return what was done when the engine serves the folder.

        The same folder again, while it is under way and as it was read, joins: so a sender that
        lost its connection may simply repeat itself.

        `path` is absolute. A `pause` of None is the default of ApplyVersion. `sender` is for whom
        it is done.

        Raises:
            WeightSyncError: APPLY_BUSY: another folder is under way, or what this one was.
                LIMIT_EXCEEDED: too many wait for it. NOT_SUPPORTED: a fleet decides what is
                served here. Or as `open_folder`, `push_folder` and ApplyVersion.
        """
        # It would be pushed, and never applied.
        refuse_member(self._calls.fleet, "apply")
        if self._waiting >= _MOST_WAITING:
            raise WeightSyncError(
                Reason.LIMIT_EXCEEDED,
                f"post the folder again later: {self._waiting} requests wait for this update",
                retry_after_s=1.0,
            )
        self._waiting += 1
        try:
            return await self._run(path, pause, sender)
        finally:
            self._waiting -= 1

    async def _run(
        self, path: str, pause: pb.PauseOptions | None, sender: HttpRequest
    ) -> dict[str, Any]:
        if self._task is None or self._task.done():
            self._path, self._files = path, None
            self._task = asyncio.create_task(self._update(path, pause, sender), name="http-update")
        elif path != self._path:
            raise WeightSyncError(
                Reason.APPLY_BUSY,
                "an update from another folder is running; post this one when that has ended",
                retry_after_s=1.0,
            )
        elif self._files is not None:
            await self._refuse_changed(path, self._files)
        task = self._task
        await asyncio.wait([task])
        if task.cancelled():
            raise WeightSyncError(
                Reason.SHUTTING_DOWN, "the server is shutting down; post the folder again later"
            )
        return task.result()

    async def close(self, grace_s: float) -> None:
        """Give an update under way so many seconds to end, then end it."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=grace_s)
            await cancel_tasks(self._task)

    async def _refuse_changed(self, path: str, files: Files) -> None:
        if await in_thread(folder_facts, self._roots, path) != files:
            raise WeightSyncError(
                Reason.APPLY_BUSY,
                "the folder changed after the running update read it; post it again when that "
                "update has ended",
                retry_after_s=1.0,
            )

    async def _update(
        self, path: str, pause: pb.PauseOptions | None, sender: HttpRequest
    ) -> dict[str, Any]:
        folder = await in_thread(open_folder, self._roots, path)
        self._files = facts_of(folder.read)
        try:
            await self._ask_layout(sender)
            sent = await in_thread(CastFolder.of, folder, self._dtypes)
            pushed = await push_folder(self._calls, sender, self._model, sent)
        finally:
            folder.close()
        request = pb.ApplyVersionRequest(model=self._model, version=pushed.version, pause=pause)
        reply = await self._calls.call(APPLY_VERSION, request, sender)
        logger.info("version %d from %s is live", pushed.version, path)
        return _document(reply) | ({"cast": sent.cast} if sent.cast else {})

    async def _ask_layout(self, sender: HttpRequest) -> None:
        """Learn in which dtypes the engine has its tensors; one that is away has what it had."""
        signature, token, more = "", "", True
        found: dict[str, str] = {}
        while more:
            request = pb.GetEngineLayoutRequest(
                model=self._model, known_signature=self._signature, page_token=token
            )
            page = await self._calls.call(GET_ENGINE_LAYOUT, request, sender)
            if page.signature in ("", self._signature):
                return
            # Of another layout than the page before, it is the first page.
            found = found if page.signature == signature else {}
            found |= {tensor.name: tensor.dtype for tensor in page.tensors}
            signature, token = page.signature, page.next_page_token
            more = bool(token)
        self._signature, self._dtypes = signature, found


def _document(reply: pb.ApplyVersionResponse) -> dict[str, Any]:
    report = reply.report
    document = {
        # As prime-rl's and vLLM's own servers answer.
        "status": "ok",
        "message": "Weights updated",
        "version": report.version,
        "content_digest": report.content_digest,
        "previous_version": report.previous_version,
        "written_bytes": report.written_bytes,
        "pause_mode": pb.PauseMode.Name(report.pause.mode).removeprefix("PAUSE_MODE_").lower(),
        "cache": pb.CacheMode.Name(report.pause.cache).removeprefix("CACHE_MODE_").lower(),
        "paused_s": report.phases.paused_total.ToNanoseconds() / 1e9,
    }
    absent = {one.engine: one.absent for one in reply.engines if one.absent}
    return document | ({"absent_engines": absent} if absent else {})


#: Seconds that a pause is kept for, unless it says, and at most.
DEFAULT_PAUSE_S, MAX_PAUSE_S = 600.0, 3600.0

#: VLLM's names.
_MODES: Mapping[str, pb.PauseMode.ValueType] = MappingProxyType(
    {
        "abort": pb.PAUSE_MODE_ABORT,
        "wait": pb.PAUSE_MODE_WAIT,
        "keep": pb.PAUSE_MODE_KEEP,
    }
)
_FLAGS: Mapping[Any, bool] = MappingProxyType(
    {"true": True, "1": True, "false": False, "0": False, True: True, False: False}
)
_FIELDS = ("mode", "clear_cache", "timeout_s")


def pause_options(fields: Mapping[str, Any]) -> tuple[pb.PauseOptions, float]:
    """Return how to pause, with vLLM's defaults, and for how many seconds that is kept.

    `fields` are `mode`, `clear_cache` and `timeout_s`, of a query or a JSON object.

    Raises:
        WeightSyncError: REQUEST_INVALID, naming the field.
    """
    if unknown := sorted(fields.keys() - set(_FIELDS)):
        raise invalid_request(
            f"{unknown[0][:64]!r} is not a field of a pause; use {', '.join(_FIELDS)}"
        )
    mode = _MODES.get(str(fields.get("mode", "abort")))
    if mode is None:
        raise invalid_request(f"mode must be one of {', '.join(_MODES)}")
    try:
        clear = _FLAGS[fields.get("clear_cache", True)]
    except (KeyError, TypeError):
        raise invalid_request("clear_cache must be true or false") from None
    cache = pb.CACHE_MODE_RECOMPUTE if clear else pb.CACHE_MODE_KEEP
    return pb.PauseOptions(mode=mode, cache=cache), _seconds(fields)


def _seconds(fields: Mapping[str, Any]) -> float:
    try:
        seconds = float(fields.get("timeout_s", DEFAULT_PAUSE_S))
    except (TypeError, ValueError):
        seconds = 0.0
    # Neither is "not a number".
    if not 0 < seconds <= MAX_PAUSE_S:
        raise invalid_request(
            f"timeout_s must be a number of seconds above 0, at most {MAX_PAUSE_S:g}"
        )
    return seconds


class PauseRequest:
    """The pause that was asked for last, until it is taken back or its time is over."""

    def __init__(self) -> None:
        self._options: pb.PauseOptions | None = None
        self._until = 0.0

    def keep(self, options: pb.PauseOptions, seconds: float) -> None:
        """Keep one for so many seconds, in the place of the one before."""
        self._options, self._until = options, clock.monotonic() + seconds

    def drop(self) -> None:
        """Take it back, if there is one."""
        self._options = None

    def current(self) -> pb.PauseOptions | None:
        """Return how to pause; None: nobody asked, or long ago."""
        if clock.monotonic() >= self._until:
            self._options = None
        return self._options
