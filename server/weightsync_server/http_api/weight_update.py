"""/update_weights: a folder becomes a version, and that version live; one folder at a time."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.http_api.folder_push import push_folder
from weightsync_server.http_api.inner_calls import APPLY_VERSION
from weightsync_server.http_api.weight_folder import open_folder
from weightsync_server.ops.tasks import in_thread

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from weightsync_server.http_api.inner_calls import InnerCalls
    from weightsync_server.http_api.weight_folder import Files
    from weightsync_server.ops.http_endpoint import HttpRequest

__all__ = ["WeightUpdates"]

logger = logging.getLogger(__name__)


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
        #: What was read of it, once that has begun.
        self._files: Files | None = None
        self._task: asyncio.Task[dict[str, Any]] | None = None

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
            WeightSyncError: APPLY_BUSY: another folder is under way, or what this one was. Or as
                `open_folder`, `push_folder` and ApplyVersion.
        """
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
        folder = await in_thread(open_folder, self._roots, path)
        folder.close()
        if folder.facts != files:
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
        self._files = folder.facts
        try:
            pushed = await push_folder(self._calls, sender, self._model, folder)
        finally:
            folder.close()
        request = pb.ApplyVersionRequest(model=self._model, version=pushed.version, pause=pause)
        reply = await self._calls.call(APPLY_VERSION, request, sender)
        logger.info("version %d from %s is live", pushed.version, path)
        return _document(reply)


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
