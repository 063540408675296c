"""A switch between two steps as the engine's own process sees it: one worker call and one label."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from weightsync.engine import SwitchOutcome
from weightsync.errors import Reason, WeightSyncError
from weightsync.vllm.bridge.rank_replies import served_after

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from weightsync.engine import SwitchOrder
    from weightsync.vllm.bridge.generation import GenerationControl

__all__ = ["SWITCH", "Switching"]

#: The worker method.
SWITCH = "weightsync_switch"


class Switching:
    """Lets the ranks switch, one switch at a time.

    Args:
        rpc: Calls a worker method on every rank.
        generation: Labels outputs.
        ranks: How many ranks answer.
        possible: Whether all of them vote, and no step runs meanwhile.

    Attributes:
        running: Whether the ranks have not all answered yet.
    """

    def __init__(
        self,
        rpc: Callable[[str, Mapping[str, Any]], Awaitable[list[dict[str, Any]]]],
        generation: GenerationControl,
        ranks: int,
        *,
        possible: bool = True,
    ) -> None:
        self.running = False
        self._possible = possible
        self._rpc = rpc
        self._generation = generation
        self._ranks = ranks

    def check(self, order: SwitchOrder, served: str) -> None:
        """Refuse a switch from anything but what is served.

        Args:
            order: The switch.
            served: Content digest of what the engine generates with; "": nothing.

        Raises:
            WeightSyncError: ENGINE_REFUSED.
        """
        if not self._possible:
            raise WeightSyncError(
                Reason.ENGINE_REFUSED,
                "pipeline stages and data parallel ranks do not take a version between the same "
                "two steps; use another pause mode",
            )
        if served != order.base_digest:
            raise WeightSyncError(
                Reason.ENGINE_REFUSED,
                f"the engine serves {served or 'nothing'}, not {order.base_digest}; its ranks must "
                "be asked what they hold",
            )

    async def run(self, order: SwitchOrder, base_version: int) -> SwitchOutcome:
        """Return what the ranks go on with, outputs labelled so.

        Args:
            order: The switch.
            base_version: The label until now; 0: none.

        Raises:
            WeightSyncError: ENGINE_AWAY: vLLM could not carry it out.
        """
        live = self._generation.live
        args = {"apply_id": order.apply_id, "base_id": order.base_id, "limit_s": order.limit_s}
        self.running = True
        try:
            live.attempt(order.version)
            call = asyncio.ensure_future(self._rpc(SWITCH, args))
            # Right behind the call in vLLM's queue, so that no step comes between the two.
            label = self._generation.label(order.version)
            replies = await call
            labelled = await label
            serves = served_after(replies, self._ranks, order)
            live.settle(_numbered(serves, order, base_version))
            if serves != order.content_digest and base_version:
                await self._generation.label(base_version)
        finally:
            # Of a switch that did not come to its end nobody knows what it left.
            live.settle(0)
            self.running = False
        return SwitchOutcome(replies, serves, labelled)


def _numbered(serves: str, order: SwitchOrder, base_version: int) -> int:
    numbers = {order.base_digest: base_version, order.content_digest: order.version}
    return numbers.get(serves, 0)
