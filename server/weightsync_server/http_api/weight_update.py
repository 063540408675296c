"""/update_weights: a folder becomes a version, and that version live; one folder at a time."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.http_api.cast_folder import CastFolder
from weightsync_server.http_api.folder_push import push_folder
from weightsync_server.http_api.inner_calls import APPLY_VERSION, GET_ENGINE_LAYOUT
from weightsync_server.http_api.weight_folder import facts_of, folder_facts, open_folder
from weightsync_server.ops.tasks import in_thread

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from weightsync_server.http_api.inner_calls import InnerCalls
    from weightsync_server.http_api.weight_folder import Files
    from weightsync_server.ops.http_endpoint import HttpRequest

__all__ = ["WeightUpdates"]

logger = logging.getLogger(__name__)

#: Senders that may wait for one update; they leave room for who asks how it stands.
_MOST_WAITING = 64


class WeightUpdates:
    """Pushes folders and applies them. One whose sender leaves goes on to its end.

    Args:
        calls: The server's methods.
        model: Name of the model.
        roots: Folders below which a folder must lie, absolute.
    """

    def __init__(self, calls: InnerCalls, model: str, roots: Sequence[Path]) -> None:
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

        Args:
            path: The folder, absolute.
            pause: How to stop generation; None: the default of ApplyVersion.
            sender: For whom it is done.

        Raises:
            WeightSyncError: APPLY_BUSY: another folder is under way, or what this one was.
                LIMIT_EXCEEDED: too many wait for it. Or as `open_folder`, `push_folder` and
                ApplyVersion.
        """
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
                "the update from another folder is under way; post this one when that has ended",
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
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _refuse_changed(self, path: str, files: Files) -> None:
        if await in_thread(folder_facts, self._roots, path) != files:
            raise WeightSyncError(
                Reason.APPLY_BUSY,
                "the folder has changed since the update that is under way has read it; post it "
                "when that has ended",
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
