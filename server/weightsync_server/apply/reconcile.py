"""Finding out what an engine holds, and making it hold one whole, verified version.

Done after every start of the server or of the engine, and after a fence. The ranks are asked first;
only when they do not hold one known version is anything written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from typing import TYPE_CHECKING

from weightsync.engine import EngineState, PauseSpec
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.apply.session import QUICK_S

if TYPE_CHECKING:
    from weightsync_server.apply.journal import Journal
    from weightsync_server.apply.session import Pause, Prepared, Session
    from weightsync_server.apply.switch import Switch
    from weightsync_server.versions import ModelVersions, VersionRecord

__all__ = ["Reconciler"]

logger = logging.getLogger(__name__)

#: Time to read a checkpoint or a stored version into a slot, seconds.
_LOAD_S = 600.0


class Reconciler:
    """Brings one engine to one verified version.

    Args:
        session: The engine.
        versions: What this server knows.
        journal: What was live before.
        switch: Writes versions into a paused engine.
        prepare_timeout_s: Longest prepare, seconds.
    """

    def __init__(
        self,
        session: Session,
        versions: ModelVersions,
        journal: Journal,
        switch: Switch,
        prepare_timeout_s: float,
    ) -> None:
        self._session = session
        self._versions = versions
        self._journal = journal
        self._switch = switch
        self._timeout_s = prepare_timeout_s

    async def run(self) -> Prepared:
        """Return what every rank is proved to hold; the engine generates on it.

        Raises:
            WeightSyncError: ENGINE_REFUSED or ENGINE_FENCED: it stands still, with the reason.
                ENGINE_AWAY: it cannot be asked now.
        """
        known, content = await self._held()
        if known is not None:
            proved = await self._prove(known)
            if proved is not None:
                return await self._go_on(proved)
        return await self._place(adopted=content)

    async def _held(self) -> tuple[VersionRecord | None, str]:
        states = await self._session.ranks.states(QUICK_S)
        contents = {"" if state.dirty else state.content_digest for state in states}
        if len(contents) != 1 or contents == {""}:
            return None, ""
        (content,) = contents
        matching = [r for r in self._versions.list() if r.content_digest == content]
        wanted = self._wanted()
        return next((r for r in matching if r.version == wanted), None) or next(
            iter(matching), None
        ), content

    def _wanted(self) -> int:
        return self._versions.live or self._journal.live[0]

    async def _prove(self, record: VersionRecord) -> Prepared | None:
        prepared = await self._prepare(record, compare_live=True)
        if all(report.proved for report in prepared.reports):
            return prepared
        prepared.lease.release()
        return None

    async def _prepare(self, record: VersionRecord, *, compare_live: bool) -> Prepared:
        lease = await self._versions.stage(record.version, _LOAD_S)
        try:
            return await self._session.prepare(
                record, lease, compare_live=compare_live, timeout_s=self._timeout_s
            )
        except BaseException:
            lease.release()
            raise

    async def _go_on(self, held: Prepared) -> Prepared:
        await self._record(held)
        health = await self._session.engine.health()
        if health.state is not EngineState.SERVING:
            await self._session.engine.resume("", held.record.version, held.digest)
        logger.info("the engine serves version %d", held.record.version)
        return held

    async def _place(self, *, adopted: str) -> Prepared:
        async with contextlib.AsyncExitStack() as stack:
            pause = await self._stand_still(stack)
            wanted = self._committed(self._wanted())
            if wanted is None:
                record = await self._adopt()
                proved = await self._prove(record)
                if proved is None and not adopted:
                    await self._refuse_adoption(record)
            else:
                record, proved = wanted, None
            if proved is None:
                proved = await self._prepare(record, compare_live=False)
                await self._switch.place(proved, None)
            await self._record(proved)
            lease = pause.lease_id if pause else ""
            await self._session.engine.resume(lease, proved.record.version, proved.digest)
        logger.info("the engine serves version %d", proved.record.version)
        return proved

    async def _stand_still(self, stack: contextlib.AsyncExitStack) -> Pause | None:
        health = await self._session.engine.health()
        if health.state is EngineState.SERVING:
            return await stack.enter_async_context(self._session.paused(PauseSpec()))
        return None

    def _committed(self, version: int) -> VersionRecord | None:
        try:
            record = self._versions.get(version) if version else None
        except WeightSyncError:
            return None
        return record if record is not None and record.commit is not None else None

    async def _adopt(self) -> VersionRecord:
        offer = f"checkpoint-{secrets.token_hex(8)}"
        future = self._session.segments.expect_offer(offer)
        path = str(self._session.segments.path)
        names = await self._session.engine.offer_checkpoint(path, offer)
        files = await asyncio.wait_for(asyncio.wrap_future(future), QUICK_S)
        logger.info("adopting the engine's checkpoint: %d files", len(names))
        newest = max((record.version for record in self._versions.list()), default=0)
        return await self._versions.adopt(files, newest + 1)

    async def _refuse_adoption(self, record: VersionRecord) -> None:
        # A loader that does more than copy would be found here: its parameters are not its tensors.
        prepared = await self._prepare(record, compare_live=True)
        names = sorted({name for report in prepared.reports for name in report.mismatched})
        prepared.lease.release()
        raise WeightSyncError(
            Reason.ENGINE_REFUSED,
            "the engine's live parameters are not plain copies of its checkpoint "
            f"({', '.join(names[:10])}); this model cannot be updated in place",
        )

    async def _record(self, held: Prepared) -> None:
        await self._session.hold(held)
        if self._versions.live != held.record.version:
            self._versions.set_live(held.record.version)
