"""What every rank of an engine does for an update, one step after the other, none without end."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

__all__ = ["UpdateSteps", "failed"]

#: How soon ranks are asked how far they are, seconds; then more seldom, because each question comes
#: between two steps of generation.
_FIRST_POLL_S, _LAST_POLL_S = 0.005, 0.1
#: How long ranks get to end a step that another one has failed at, seconds.
_LAST_S = 2.0
#: How long ranks may take to get memory, seconds.
_RESERVE_S = 600.0


class UpdateSteps:
    """Has every rank do a step, in threads beside generation, and waits for all of them.

    Args:
        call: Calls `weightsync_update` on every rank; one reply per rank, in order.
        limit_s: Longest time in which nothing comes, seconds.
    """

    def __init__(
        self,
        call: Callable[[Mapping[str, Any]], Awaitable[list[dict[str, Any]]]],
        limit_s: float,
    ) -> None:
        self._call = call
        self._limit_s = limit_s

    async def meet(self, step: str, wrong: str, **args: Any) -> list[dict[str, Any]]:
        """Do a step of the connection to a trainer, which ends unless every rank is equally far.

        Returns what the ranks report; what came may be wrong all the same, see `failed`.

        Args:
            step: Its name.
            wrong: What a rank that fails did not do.
            **args: What it needs.

        Raises:
            WeightSyncError: ENGINE_REFUSED; a rank has failed.
        """
        try:
            # A rank that cannot be asked ends it by itself, and a little later.
            await self.ask(step, limit_s=self._limit_s + _LAST_S, **args)
            reports = await self._wait(wrong)
        except BaseException:
            await asyncio.shield(self.leave())
            raise
        if any(report["raised"] for report in reports):
            await self.leave()
            _check(reports, wrong)
        return reports

    async def reserve(self) -> None:
        """Get the memory for what was checked.

        A rank that has none takes part in what follows all the same, which it then drops.

        Raises:
            WeightSyncError: ENGINE_REFUSED; a rank does not begin, or hangs.
        """
        await self.ask("reserve")
        until, pause_s = clock.monotonic() + _RESERVE_S, _FIRST_POLL_S
        while running := [r["rank"] for r in await self.ask("poll") if r["running"]]:
            if clock.monotonic() > until:
                raise WeightSyncError(
                    Reason.ENGINE_REFUSED,
                    f"rank {running[0]} got no memory for the update within {_RESERVE_S:g} s",
                )
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.2, _LAST_POLL_S)

    async def run(self, step: str, wrong: str, **args: Any) -> None:
        """Do a step that is no matter of a connection; as `meet` otherwise."""
        await self.ask(step, **args)
        _check(await self._wait(wrong), wrong)

    async def ask(self, step: str, **args: Any) -> list[dict[str, Any]]:
        """Return what every rank reports at once, in order.

        Raises:
            WeightSyncError: ENGINE_REFUSED; a rank does not begin the step.
        """
        reports = await self._call({"step": step, **args})
        for report in reports:
            if not report["ok"]:
                raise WeightSyncError(
                    Reason.ENGINE_REFUSED, f"rank {report['rank']}: {report['error']}"
                )
        return reports

    async def leave(self) -> None:
        """End the connection to a trainer, where the engine still answers."""
        with contextlib.suppress(WeightSyncError):
            await self.ask("leave")

    async def forget(self) -> None:
        """Drop what has come; the connection goes too where a rank does not let go otherwise."""
        try:
            await self.ask("drop")
        except WeightSyncError:
            await self.leave()

    async def _wait(self, wrong: str) -> list[dict[str, Any]]:
        """Return what the ranks report when none is at work any more.

        Raises:
            WeightSyncError: ENGINE_REFUSED; one gets nothing, or waits for one that has failed.
        """
        arrived, since = [-1], clock.monotonic()
        pause_s = _FIRST_POLL_S
        while True:
            reports = await self.ask("poll")
            now = [int(report["arrived"]) for report in reports]
            if now != arrived:
                arrived, since = now, clock.monotonic()
            running = [report["rank"] for report in reports if report["running"]]
            if not running:
                return reports
            raised = [report for report in reports if report["raised"]]
            if clock.monotonic() - since > (_LAST_S if raised else self._limit_s):
                why = f"nothing came for {self._limit_s:g} s (WEIGHTSYNC_UPDATE_TIMEOUT)"
                rank = raised[0]["rank"] if raised else running[0]
                raise WeightSyncError(
                    Reason.ENGINE_REFUSED,
                    f"rank {rank} {wrong}: {raised[0]['failure'] if raised else why}; call "
                    "init_weight_transfer_engine and send the update again",
                )
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.2, _LAST_POLL_S)


def failed(reports: list[dict[str, Any]], wrong: str) -> WeightSyncError | None:
    """Return the refusal where a rank reports a failure; None: all is well."""
    for report in reports:
        if report["failure"]:
            return WeightSyncError(
                Reason.ENGINE_REFUSED, f"rank {report['rank']} {wrong}: {report['failure']}"
            )
    return None


def _check(reports: list[dict[str, Any]], wrong: str) -> None:
    failure = failed(reports, wrong)
    if failure is not None:
        raise failure
