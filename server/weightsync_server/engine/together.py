"""Cutovers of several engines in step: all stand still, all are proved, one decision for all."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from weightsync import failpoints
from weightsync.engine import OpenApply
from weightsync.errors import WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from weightsync_server.engine.outcome import CutoverPlan

__all__ = ["Member", "Together"]

logger = logging.getLogger(__name__)


class Together:
    """Two barriers that engines pass together, or none of them does.

    Args:
        engines: Names of those that take part.
        decide: Makes the decision to go on last: called once, when every engine is proved.
        patience_s: The longest time that `decide` may wait for others, seconds.
    """

    def __init__(
        self,
        engines: Iterable[str],
        decide: Callable[[], Awaitable[None]],
        patience_s: float = 0.0,
    ) -> None:
        names = frozenset(engines)
        self._patience_s = patience_s
        self._still = _Barrier(names, _nothing)
        self._proved = _Barrier(names, decide)

    def member(self, engine: str) -> Member:
        """Return the part that one engine has in it."""
        return Member(engine, self._still, self._proved, self._patience_s)


class Member:
    """One engine's part.

    Args:
        engine: Its name.
        still: Passed when all stand still.
        proved: Passed when all hold the target.
        patience_s: The longest time that the decision may take then, seconds.

    Attributes:
        patience_s: As given.
    """

    def __init__(
        self, engine: str, still: _Barrier, proved: _Barrier, patience_s: float = 0.0
    ) -> None:
        self._engine = engine
        self._still = still
        self._proved = proved
        self.patience_s = patience_s

    @staticmethod
    def open_apply(plan: CutoverPlan) -> OpenApply:
        """Return what an engine asks for whose pause runs out before the decision."""
        target = plan.target
        return OpenApply(target.apply_id, plan.base.record.version, target.record.version)

    async def stand_still(self) -> list[str]:
        """Tell that the engine stands still; return why it shall go on as before, empty: all do."""
        return await self._still.arrive(self._engine, [])

    async def agree(self, failures: list[str]) -> list[str]:
        """Return why the engine shall go back to what it served; empty: all go on.

        Args:
            failures: Its own.
        """
        return await self._proved.arrive(self._engine, failures)

    def leave(self, reason: str) -> None:
        """Tell that it goes on with neither; nothing happens where it was decided already."""
        for barrier in (self._still, self._proved):
            barrier.fail(self._engine, reason)


class _Barrier:
    def __init__(self, engines: frozenset[str], pass_all: Callable[[], Awaitable[None]]) -> None:
        self._missing = set(engines)
        self._pass_all = pass_all
        self._passing: asyncio.Task[None] | None = None
        self._outcome: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()

    async def arrive(self, engine: str, failures: list[str]) -> list[str]:
        if failures:
            self._note(engine, failures)
            return failures
        if engine in self._missing:
            self._missing.discard(engine)
            if not self._missing and not self._outcome.done():
                # In a task of its own: a decision that is begun is made, whoever is cancelled.
                self._passing = asyncio.create_task(self._pass())
        # Shielded: one that is cancelled must not take the outcome from the others.
        return await asyncio.shield(self._outcome)

    def fail(self, engine: str, reason: str) -> None:
        if engine in self._missing:
            self._note(engine, [reason])

    def _note(self, engine: str, failures: list[str]) -> None:
        self._missing.discard(engine)
        if self._passing is None and not self._outcome.done():
            self._outcome.set_result([f"engine {engine}: {failure}" for failure in failures])

    async def _pass(self) -> None:
        try:
            await self._pass_all()
        except WeightSyncError as error:
            self._outcome.set_result([error.message])
        except Exception:
            logger.exception("engines that go together go back")
            self._outcome.set_result(["a fault in the server; its log tells why"])
        else:
            self._outcome.set_result([])


async def _nothing() -> None:
    await failpoints.reach("host.still")
