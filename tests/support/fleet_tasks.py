"""A fleet of tasks over one folder, whose links can be cut and whose members can be killed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.fleet_hosts import FileHost, make_member, version
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.coordination.folder_keys import FolderKeys
from weightsync_server.fleet.coordinator import Coordinator
from weightsync_server.fleet.fleet_settings import FleetLimits
from weightsync_server.store.store_records import decode_document, encode_document

if TYPE_CHECKING:
    from collections.abc import Collection

    from weightsync_server.coordination.coordination import Creation, MemberList, Membership
    from weightsync_server.decide import ApplyOrder
    from weightsync_server.fleet.coordinator import Outcome
    from weightsync_server.fleet.fleet_member import FleetMember

__all__ = ["LIMITS", "CutRegister", "Fleet", "in_format", "until"]

LIMITS = FleetLimits(
    undecided_s=1.0,
    member_ttl_s=1,
    grace_s=0.3,
    prepare_s=5.0,
    settle_s=5.0,
    retry_s=0.1,
    poll_s=0.05,
)


def in_format(number: object, value: bytes) -> bytes:
    """Return a record as a release writes it that has another format."""
    return encode_document(decode_document(value) | {"format": number})


class CutRegister(FolderKeys):
    """A register whose link can be cut: what is asked meanwhile is not answered in time.

    Attributes:
        cut: It is.
        frozen: Nor are its members renewed.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.cut = self.frozen = False

    async def create(self, key: str, value: bytes) -> Creation:
        await self._answers()
        return await super().create(key, value)

    async def create_among(
        self, key: str, value: bytes, prefix: str, known: Collection[str]
    ) -> Creation | None:
        await self._answers()
        return await super().create_among(key, value, prefix, known)

    async def members(self, prefix: str) -> MemberList:
        await self._answers()
        return await super().members(prefix)

    async def get(self, key: str) -> bytes | None:
        await self._answers()
        return await super().get(key)

    async def member(self, key: str, value: bytes, ttl_s: int) -> Membership:
        await self._answers()
        membership = await super().member(key, value, ttl_s)
        renew = membership.renew

        async def unless_frozen() -> None:
            if self.frozen:
                await self._answers()
            await renew()

        # Also of one that was on its way when it was frozen.
        membership.renew = unless_frozen  # type: ignore[method-assign]  # it is of this test
        return membership

    async def list(self, prefix: str, start: str = "") -> dict[str, bytes]:
        await self._answers()
        return await super().list(prefix, start)

    async def _answers(self) -> None:
        if self.cut:
            await asyncio.sleep(0.1)
            raise WeightSyncError(Reason.DEADLINE_EXCEEDED, "the link is cut")


class Fleet:
    """Members as tasks of this process, over one folder.

    Attributes:
        hosts: By name.
        members: By name; those that run.
        links: The register as each member has it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.register = FolderKeys(folder / "register")
        self.hosts: dict[str, FileHost] = {}
        self.members: dict[str, FleetMember] = {}
        self.links: dict[str, CutRegister] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, *names: str, limits: FleetLimits = LIMITS) -> None:
        """Start members, and wait until each has read the register."""
        for name in names:
            self.links[name] = CutRegister(self.folder / "register")
            member = make_member(self.links[name], self.folder / name, limits)
            self.members[name] = member
            self.hosts[name] = member.host  # type: ignore[assignment]  # it is made so above
            self._tasks[name] = asyncio.create_task(member.run())
        await until(lambda: all(self.members[name].view.history for name in names))

    async def kill(self, name: str) -> None:
        """End a member without a word; its host stays as it is."""
        task = self._tasks.pop(name)
        member = self.members.pop(name)
        member.view.presence.close = _nothing  # type: ignore[method-assign]  # it does not say goodbye
        task.cancel()
        await asyncio.wait({task})
        membership = member.view.presence._membership
        if membership is not None and membership._task is not None:
            membership._task.cancel()

    def freeze(self, name: str) -> None:
        """Have a member neither read nor be seen any more, as one whose process is stopped."""
        link = self.links[name]
        link.cut = link.frozen = True

    def thaw(self, name: str) -> None:
        """Let it go on."""
        link = self.links[name]
        link.cut = link.frozen = False

    def coordinator(self, limits: FleetLimits = LIMITS) -> Coordinator:
        return Coordinator(self.register, "coordinator", limits)

    async def begin(
        self, number: int, order: ApplyOrder, held: str, limits: FleetLimits = LIMITS
    ) -> tuple[asyncio.Task[Outcome], asyncio.Event]:
        """Begin an apply that one member knows, and is ready for once the event is set."""
        gate = self.hosts[held].gate = asyncio.Event()
        applying = asyncio.create_task(self.coordinator(limits).apply(version(number), order))
        await until(lambda: self.members[held].view.history.running)  # type: ignore[union-attr]  # it has started
        return applying, gate

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    @property
    def serving(self) -> dict[str, int]:
        """What each host serves; 0: nothing."""
        return {name: host.serves for name, host in self.hosts.items()}

    async def until_serving(self, **wanted: int) -> None:
        await until(lambda: self.serving == wanted)


async def _nothing() -> None: ...


async def until(condition: Any) -> None:
    """Wait until something holds; the test's own time-out ends a wait for nothing."""
    while not condition():  # noqa: ASYNC110 - many things are asked
        await asyncio.sleep(0.01)
