"""The push of what a trainer has written into an engine's memory: whose it is, and what it awaits.

A version that is committed may be taken by anybody: followers, a fleet, the next server, whoever
asks for the newest. So this one is not, until every rank is proved to hold it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field


def _ignore() -> None:
    pass


@dataclass(eq=False)
class InPlacePush:
    """A transaction's push, as the transaction and the push both know it.

    Attributes:
        key: The idempotency key of the push, which nobody but its trainer is told.
        who: The caller whose push alone it is, where others may know the key; empty: whoever names
            the key.
        on_arrived: Called once, when all of it is here and its commit was asked for.
    """

    key: str
    who: str = ""
    on_arrived: Callable[[], None] = _ignore
    _decided: asyncio.Event = field(default_factory=asyncio.Event)
    _arrived: bool = False

    def may_come_from(self, who: str, key: str) -> bool:
        return key == self.key and self.who in ("", who)

    async def decided(self) -> None:
        """Return when every rank holds what has arrived, or when the push was given up."""
        if not self._arrived:
            self._arrived = True
            self.on_arrived()
        await self._decided.wait()

    def decide(self) -> None:
        """Let the commit go on: it is proved, or the push has failed by now."""
        self._decided.set()
