"""Keeps engines of this host from beginning to serve, whoever finds out what they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

__all__ = ["ServingGate"]


class ServingGate:
    """The host's side of `HostParts.joining`, which outlives any one task.

    Args:
        joining: Taken by all that let an engine serve.

    Attributes:
        is_shut: Whether nobody else has it.
    """

    def __init__(self, joining: asyncio.Lock) -> None:
        self._joining = joining
        self.is_shut = False

    async def shut(self) -> None:
        """Let no engine begin to serve from now on; waits for one that is about to."""
        if not self.is_shut:
            await self._joining.acquire()
            self.is_shut = True

    def open(self) -> None:
        """Let those that wait serve what is decided."""
        if self.is_shut:
            self.is_shut = False
            self._joining.release()
