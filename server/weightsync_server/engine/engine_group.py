"""The engines of this host that an apply takes for itself, and those that take no part in it."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.engine.engine_applier import EngineApplier, live_version
from weightsync_server.engine.refusals import OUT_OF_REACH

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from weightsync_server.engine.outcome import PreparedVersion
    from weightsync_server.engine.session import EngineSession

__all__ = ["EngineGroup", "GroupMember", "take_engines"]

#: How often it is looked whether an engine that generates can be asked what, seconds.
_LOOK_S = 0.1
#: What keeps an engine away that may stand still: it joins later.
_ABSENT = OUT_OF_REACH | {Reason.ENGINE_FENCED}


@dataclass
class GroupMember:
    """One engine that nobody else does anything with.

    Attributes:
        applier: Makes versions live on it.
        session: It.
        live: What it serves.
        error: What its part of the apply has ended with; None: nothing failed.
    """

    applier: EngineApplier
    session: EngineSession
    live: PreparedVersion
    error: BaseException | None = None

    @property
    def name(self) -> str:
        """Of the engine."""
        return self.applier.name


@dataclass
class EngineGroup:
    """Who takes part in an apply.

    Attributes:
        apply_id: What all of them call it.
        whole: Whether every engine of this host was asked for, and there may be several.
        members: Engines, in the order of their names.
        absent: Why others take no part, by name: they stand still, and join later.
    """

    apply_id: str
    whole: bool
    members: list[GroupMember] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)


@contextlib.asynccontextmanager
async def take_engines(
    appliers: Sequence[EngineApplier], group: EngineGroup, proof_s: float | None, patience_s: float
) -> AsyncIterator[EngineGroup]:
    """Take engines one after the other, always in the same order, and give all back at the end.

    Args:
        appliers: Of the engines, in the order of their names.
        group: Is filled.
        proof_s: As in `EngineSupervisor.exclusive`.
        patience_s: Longest wait for an engine that generates and cannot be asked yet, seconds.

    Raises:
        WeightSyncError: As in `EngineSupervisor.exclusive`. Of several engines only if none can be
            had, or one that cannot generates.
    """
    first: WeightSyncError | None = None
    async with contextlib.AsyncExitStack() as stack:
        for applier in appliers:
            try:
                if group.whole:
                    await _answering(applier, patience_s)
                member = await stack.enter_async_context(_taken(applier, group, proof_s))
            except WeightSyncError as error:
                alone = len(appliers) == 1
                if alone or error.reason not in _ABSENT or await applier.supervisor.generates():
                    raise
                group.absent[applier.name] = error.message
                first = first or error
            else:
                group.members.append(member)
        if first is not None and not group.members:
            raise first
        yield group


@contextlib.asynccontextmanager
async def _taken(
    applier: EngineApplier, group: EngineGroup, proof_s: float | None
) -> AsyncIterator[GroupMember]:
    """Take an engine, and give it back with its own failure.

    So what one engine does not survive is no reason to ask the ranks of the others.
    """
    failure: BaseException | None = None
    own: BaseException | None = None
    try:
        async with applier.supervisor.exclusive(group.apply_id, proof_s) as session:
            member = GroupMember(applier, session, live_version(session))
            try:
                yield member
            except BaseException as error:  # noqa: BLE001 - it is raised below
                failure = error
                explained = any(one.error is not None for one in group.members)
                own = member.error if explained else error
                if own is not None:
                    raise own from None
    except BaseException:
        if failure is None or own is failure:
            raise
    if failure is not None:
        raise failure


async def _answering(applier: EngineApplier, patience_s: float) -> None:
    """Wait while an engine generates and nobody knows yet with what."""
    supervisor = applier.supervisor

    async def unknown() -> bool:
        return not supervisor.serving and await supervisor.generates()

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            while await unknown():  # noqa: ASYNC110 - there is no event in another process
                await asyncio.sleep(_LOOK_S)
