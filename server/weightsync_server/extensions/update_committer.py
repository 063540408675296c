"""Makes versions of what an engine receives by itself over a transfer of vLLM's own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from weightsync.engine import WEIGHT_UPDATES, UpdateFeed, WaitingUpdate
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.engine import Applier, EngineSupervisor
from weightsync_server.engine.file_offers import offered
from weightsync_server.engine.outcome import reject
from weightsync_server.ops.os_errors import translate_os_errors
from weightsync_server.ops.tasks import cancel_tasks

if TYPE_CHECKING:
    from weightsync_server.catalog.record import VersionRecord


logger = logging.getLogger(__name__)

#: How often it is looked whether there is an engine to watch, seconds.
_LOOK_S = 0.5
_FAULT = "a fault in the server; see its log"


class UpdateCommitter:
    """Commits each update as the next version and applies it; the trainer then has its answer.

    `feed` is None when the engine receives no updates.
    """

    def __init__(
        self, supervisor: EngineSupervisor, feed: UpdateFeed | None, applier: Applier
    ) -> None:
        self._supervisor = supervisor
        self._feed = feed
        self._applier = applier
        self._model, self._segments = supervisor.context.model, supervisor.context.segments
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch, if the engine can receive anything."""
        if self._feed is not None:
            self._task = asyncio.create_task(self._run(self._feed), name="weight-updates")

    async def stop(self) -> None:
        """Watch no longer; a trainer that waits is told that nobody knows the outcome."""
        await cancel_tasks(self._task)

    async def _run(self, feed: UpdateFeed) -> None:
        while True:
            if WEIGHT_UPDATES in self._supervisor.capabilities:
                try:
                    async with contextlib.aclosing(feed.watch()) as updates:
                        async for update in updates:
                            await self._answer(feed, update)
                except WeightSyncError as error:
                    logger.debug("weight updates are not watched: %s", error.message)
                except Exception:
                    logger.exception("watching weight updates failed, and is started again")
            await asyncio.sleep(_LOOK_S)

    async def _answer(self, feed: UpdateFeed, update: WaitingUpdate) -> None:
        version, failure = 0, ""
        try:
            version = await self._serve(feed, update)
        except WeightSyncError as error:
            failure = error.message
        except Exception:
            logger.exception("update %s failed", update.update_id)
            failure = _FAULT
        if failure:
            logger.warning("update %s is not served: %s", update.update_id, failure)
        await feed.end(update.update_id, version, failure)

    async def _serve(self, feed: UpdateFeed, update: WaitingUpdate) -> int:
        """Return the version that an update has become, when the engine serves it."""
        # It would be committed, and never applied.
        self._applier.refuse_in_fleet("apply")
        base = self._base() if update.partial else None
        record = await self._commit(feed, update, base)
        logger.info("version %d arrived over %s", record.version, update.backend)
        request = pb.ApplyVersionRequest(
            model=record.model, version=record.version, idempotency_key=update.update_id
        )
        try:
            cause = f"vLLM received an update over {update.backend}"
            await self._applier.apply(request, base, cause=cause)
        except Exception as error:
            # Nobody asked for it by number, so "newest" must not mean what the trainer was refused.
            if self._supervisor.served.live != record.version:
                why = error.message if isinstance(error, WeightSyncError) else _FAULT
                await reject(self._model.serving, record.version, why)
            raise
        return record.version

    async def _commit(
        self, feed: UpdateFeed, update: WaitingUpdate, base: VersionRecord | None
    ) -> VersionRecord:
        metadata = {"transfer": update.backend} | ({"label": update.label} if update.label else {})
        if base is not None:
            metadata["base_version"] = str(base.version)
        with translate_os_errors("the update"):
            async with offered(
                self._segments,
                lambda path, offer: feed.offer(update.update_id, path, offer),
                "the update",
            ) as files:
                if not files:
                    raise WeightSyncError(
                        Reason.ENGINE_REFUSED, "send the update again: it arrived without a tensor"
                    )
                model = self._model
                return await model.adoption.receive(
                    files, metadata, model.accepted, base, model.engine_layouts
                )

    def _base(self) -> VersionRecord:
        """Return the version whose tensors an update keeps that lacks them.

        Nothing else may be live when the update is applied: it would be undone.
        """
        live = self._supervisor.served.live
        if not live:
            raise WeightSyncError(
                Reason.ENGINE_REFUSED,
                "send all tensors: the engine serves no version whose other tensors could be kept",
            )
        return self._model.table.get(live)
