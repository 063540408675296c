"""The engines behind one server as the host of a fleet's member."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Protocol

from weightsync import clock
from weightsync.engine import FENCES_ON_EXPIRY, PauseSpec
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.engine.rejection import reject
from weightsync_server.fleet.fleet_plan import FleetVersion
from weightsync_server.fleet_host.host_cutover import HostCutover
from weightsync_server.fleet_host.host_pause import HostPause
from weightsync_server.fleet_host.serving_gate import ServingGate
from weightsync_server.ops.os_errors import translate_os_errors

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.engine import EngineSet, EngineSupervisor, HostParts, ModelParts
    from weightsync_server.residency.leases import SlotLease

__all__ = ["FetchOnDemand", "FleetHost"]

#: How often it is looked whether a version has come, or an engine serves; seconds.
_LOOK_S = 0.05
#: How long engines that are slower than the first are waited for, seconds.
_OTHERS_S = 10.0


class FetchOnDemand(Protocol):
    """Brings the versions that are asked for; a follower does, from its origin.

    Attributes:
        url: From where.
    """

    url: str

    def wanting(self, version: int, content_digest: str = "") -> AbstractContextManager[None]:
        """Have a version brought, at once, until the block ends."""

    async def lacking(self, version: int, content_digest: str = "") -> WeightSyncError | None:
        """Return why a version will not come; None: it may."""


class FleetHost:
    """Implements `weightsync_server.fleet.host_apply.HostApply`.

    While it serves, a version goes to all engines in one cutover, of which the fleet's decision is
    the last step before they resume. A host that serves nothing has a gate shut in front of its
    engines: what it is let serve is written to the journal, the gate is opened, and each engine is
    reconciled to it.

    Args:
        engines: They.
        model: What they serve.
        host: What they share.
        undecided_s: As in `FleetLimits`.
        fetch_s: How long a version that is not here yet is waited for, seconds; 0: not at all.

    Attributes:
        source: Brings versions that are not here; None: there is nothing that could.
    """

    def __init__(
        self,
        engines: EngineSet,
        model: ModelParts,
        host: HostParts,
        undecided_s: float,
        fetch_s: float = 0.0,
    ) -> None:
        self._engines, self._model, self._limits = engines, model, host.limits
        self._undecided_s, self._fetch_s = undecided_s, fetch_s
        self.source: FetchOnDemand | None = None
        self._expected: FleetVersion | None = None
        self._fetching = contextlib.ExitStack()
        self._gate = ServingGate(host.joining)
        self._turn = asyncio.Lock()
        self._cutover: HostCutover | HostPause | None = None
        self._staged: SlotLease | None = None

    async def begin(self) -> None:
        """Let no engine begin to serve before the member says what; before engines are started."""
        await self._gate.shut()

    def expect(self, target: FleetVersion | None) -> None:
        """Have a version brought that is not here and will be asked for; nobody waits for it.

        Args:
            target: It takes the place of the last one; None: none is expected.
        """
        if target == self._expected:
            return
        self._expected = target
        self._fetching.close()
        if target is not None and self.source is not None and self._known(target) is None:
            self._fetching.enter_context(self.source.wanting(target.number, target.digest))

    async def stop(self) -> None:
        """Leave everything as it is: engines that stand still are fenced when their lease ends."""
        self._fetching.close()
        async with self._turn:
            if self._cutover is not None:
                await self._cutover.close()
                self._cutover = None
            self._release()

    async def prepare(self, target: FleetVersion, pause: PauseSpec | None = None) -> None:
        """As `HostApply` says; a host that serves nothing has the version in memory."""
        async with self._turn:
            await self._let_go()
            if self._gate.is_shut:
                # Its member takes it for one that serves nothing; now it is so, before the version
                # is waited for.
                await self._fence_engines(f"this host goes to version {target.number} first")
                await self._check_answered()
            record = await self._find(target)
            if self._gate.is_shut:
                timeout_s = self._limits.prepare_timeout_s
                self._staged = await self._model.stager.stage(record.version, timeout_s)
                return
            await self._until_settled()
            cutover = HostCutover(
                record,
                self._engines,
                self._gate,
                self._limits.prepare_timeout_s,
                2 * self._undecided_s,
                pause or PauseSpec(),
                self._model.slots,
            )
            try:
                await cutover.prepare()
            except BaseException:
                await cutover.close()
                self._gate.open()
                raise
            self._cutover = cutover

    async def pause(self) -> None:
        """As `HostApply` says; what was prepared is in place then."""
        async with self._turn:
            cutover = self._cutover or await self._pause_of_live()
            if cutover is None:
                await self._stop_serving("this host stands still with its fleet")
                return
            self._cutover = cutover
            try:
                await cutover.pause()
            except WeightSyncError:
                self._cutover = None
                await cutover.close()
                self._gate.open()
                raise

    async def commit(self, target: FleetVersion) -> None:
        """As `HostApply` says."""
        async with self._turn:
            cutover = self._cutover
            try:
                if cutover is not None and cutover.record.content_digest == target.digest:
                    await cutover.commit()
                    self._cutover = None
                    self._gate.open()
                else:
                    await self._place(await self._find(target))
            except WeightSyncError as error:
                await self._stop_serving(error.message)
                raise
            finally:
                self._release()

    async def resume(self) -> None:
        """As `HostApply` says."""
        async with self._turn:
            cutover = self._cutover
            try:
                if cutover is None:
                    await self._go_on()
                elif cutover.stands_still:
                    await cutover.call_off()
                    self._cutover = None
                    self._gate.open()
                else:
                    await self._let_go()
            except WeightSyncError as error:
                await self._stop_serving(error.message)
                raise
            finally:
                self._release()

    async def fence(self, reason: str) -> None:
        """As `HostApply` says."""
        async with self._turn:
            await self._stop_serving(reason)

    async def reject(self, digest: str, reason: str = "") -> None:
        """As `HostApply` says."""
        for record in self._model.table.list():
            if record.content_digest == digest:
                why = reason or "a rollback of the fleet has left it"
                await reject(self._model.serving, record.version, why)

    async def accept(self, digest: str) -> None:
        """As `HostApply` says."""
        same = [one for one in self._model.table.list() if one.content_digest == digest]
        if any(one.rejected_reason for one in same):
            # With it all that have this content.
            await self._model.serving.accept(same[0].version)

    def live(self) -> FleetVersion | None:
        """As `HostApply` says; engines that cannot be asked count for nothing."""
        versions = {
            FleetVersion(record.version, record.content_digest)
            for one in self._engines.supervisors
            if (record := one.proved) is not None
        }
        return versions.pop() if len(versions) == 1 else None

    async def find(self, version: int) -> FleetVersion:
        """Return a version of this server by its number; one that its origin has is fetched.

        Raises:
            WeightSyncError: VERSION_UNKNOWN, or VERSION_NOT_DURABLE while it is not committed.
        """
        record = await self._arrived(lambda: self._committed(version), version)
        if record is None:
            if self.source is not None and self._model.table.find(version) is None:
                raise self._absent(version)
            self._model.table.get(version)
            raise WeightSyncError(
                Reason.VERSION_NOT_DURABLE,
                f"version {version} is not committed yet, and a fleet goes to what lasts; wait "
                "for its push to end",
            )
        return FleetVersion(record.version, record.content_digest)

    async def _pause_of_live(self) -> HostPause | None:
        """Return a pause of what serves already what the fleet goes to; None: it must be fenced."""
        live = None if self._gate.is_shut else self.live()
        engines = [one for one in self._engines.supervisors if one.serving]
        able = all(FENCES_ON_EXPIRY in one.capabilities for one in engines)
        if live is None or not engines or not able:
            return None
        record = await self._find(live)
        return HostPause(record, self._engines, self._gate, self._limits.prepare_timeout_s)

    async def _let_go(self) -> None:
        """Drop what was prepared."""
        self._release()
        cutover, self._cutover = self._cutover, None
        if cutover is None:
            return
        if cutover.stands_still:
            self._cutover = cutover
            await self._stop_serving("this host goes to another version")
            return
        await cutover.close()
        self._gate.open()

    def _release(self) -> None:
        if self._staged is not None:
            self._staged.release()
            self._staged = None

    async def _stop_serving(self, reason: str) -> None:
        """Fence every engine, and shut the gate."""
        await self._fence_engines(reason)
        if not self._gate.is_shut:
            # Who has it may be letting an engine serve.
            await self._gate.shut()
            await self._fence_engines(reason)
        cutover, self._cutover = self._cutover, None
        if cutover is not None:
            await cutover.close()

    async def _fence_engines(self, reason: str) -> None:
        fences = (one.fence(reason) for one in self._engines.supervisors)
        outcomes = await asyncio.gather(*fences, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _place(self, record: VersionRecord) -> None:
        """Let the engines serve a version that was not prepared on them."""
        await self._stop_serving(f"version {record.version} is placed")
        with translate_os_errors("the apply"):
            await self._engines.host_journal.place(record.version)
        self._gate.open()
        await self._until_served(record)

    async def _go_on(self) -> None:
        """Let the engines serve what they hold."""
        live = self.live()
        if live is None:
            raise WeightSyncError(
                Reason.ENGINE_AWAY,
                "it is not known what the engines of this host hold; they are asked again",
            )
        record = await self._find(live)
        decided = {one.journal.decided for one in self._engines.supervisors}
        if decided - {0, record.version}:
            with translate_os_errors("the apply"):
                await self._engines.host_journal.place(record.version)
        self._gate.open()
        await self._until_served(record)

    async def _until_served(self, record: VersionRecord) -> None:
        """Return when the engines serve a version, all or those that can soon, and nothing else.

        Raises:
            WeightSyncError: ENGINE_AWAY: none does.
        """
        begun = clock.monotonic()
        while clock.monotonic() < begun + self._limits.prepare_timeout_s:
            engines = self._engines.supervisors
            serving = [one for one in engines if one.serving and _holds(one, record)]
            others = [one for one in engines if one not in serving]
            late = clock.monotonic() >= begun + _OTHERS_S
            if serving and (not others or (late and not await _any_generates(others))):
                return
            if serving and not await _any_answers(others):
                return
            if not serving:
                await self._check_answered()
            await asyncio.sleep(_LOOK_S)
        raise WeightSyncError(
            Reason.ENGINE_AWAY,
            f"no engine of this host serves version {record.version} yet; see GetStatus",
        )

    async def _check_answered(self) -> None:
        """Refuse where no engine is there that could take a version: nobody waits for vLLM.

        Raises:
            WeightSyncError: ENGINE_AWAY.
        """
        engines = self._engines.supervisors
        if engines and not await _any_answers(engines):
            names = ", ".join(sorted(one.name for one in engines))
            raise WeightSyncError(
                Reason.ENGINE_AWAY,
                f"no engine of this host answers ({names}); start vLLM, or stop this member's "
                "server so that its fleet goes on without it",
                retry_after_s=1.0,
            )

    async def _until_settled(self) -> None:
        """Wait for engines whose ranks are being asked; those that are away are not waited for."""
        end = clock.monotonic() + _OTHERS_S
        while any(one.proved and not one.serving for one in self._engines.supervisors):
            if clock.monotonic() >= end:
                return
            await asyncio.sleep(_LOOK_S)

    async def _find(self, target: FleetVersion) -> VersionRecord:
        """Return a version of this server; one that its origin has is fetched.

        Raises:
            WeightSyncError: VERSION_UNKNOWN; the origin has none such, or it does not come.
        """
        number, digest = target.number, target.digest
        record = await self._arrived(lambda: self._known(target), number, digest)
        if record is None:
            raise self._absent(number)
        return record

    def _absent(self, version: int) -> WeightSyncError:
        if self.source is not None:
            lacks = (
                f"has not come from {self.source.url} in {self._fetch_s:g} s; see in the log of "
                "this server why"
            )
        else:
            lacks = (
                "is not on this host; push it here, or start this server with --follow and the "
                "origin of the others"
            )
        return WeightSyncError(Reason.VERSION_UNKNOWN, f"version {version} of the fleet {lacks}")

    async def _arrived(
        self, find: Callable[[], VersionRecord | None], version: int, content_digest: str = ""
    ) -> VersionRecord | None:
        """Return what is here, or comes while it is waited for; None: it does not.

        Raises:
            WeightSyncError: It will not.
        """
        record = find()
        if record is not None or self.source is None:
            return record
        with self.source.wanting(version, content_digest):
            refusal = await self.source.lacking(version, content_digest)
            end = clock.monotonic() + self._fetch_s
            while (record := find()) is None and clock.monotonic() < end:
                if refusal is not None:
                    raise refusal
                await asyncio.sleep(_LOOK_S)
        return record

    def _committed(self, version: int) -> VersionRecord | None:
        record = self._model.table.find(version)
        return record if record is not None and record.commit is not None else None

    def _known(self, target: FleetVersion) -> VersionRecord | None:
        same = [
            record
            for record in self._model.table.list()
            if record.content_digest == target.digest and record.commit is not None
        ]
        numbered = [record for record in same if record.version == target.number]
        return next(iter(numbered or same), None)


async def _any_answers(engines: list[EngineSupervisor]) -> bool:
    return any(await asyncio.gather(*(one.answers() for one in engines)))


async def _any_generates(engines: list[EngineSupervisor]) -> bool:
    return any(await asyncio.gather(*(one.generates() for one in engines)))


def _holds(engine: EngineSupervisor, record: VersionRecord) -> bool:
    proved = engine.proved
    return proved is not None and proved.content_digest == record.content_digest
