"""Every engine core of one AsyncLLM: vLLM's own calls reach all, and answer for the first one."""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["EngineCores"]


class EngineCores:
    """The engine cores that vLLM's client has, one per data parallel rank, in that order.

    Args:
        client: AsyncLLM's `engine_core`.

    Attributes:
        count: How many there are.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._engines = tuple(getattr(client, "core_engines", ()))
        self.count = len(self._engines) or 1

    @property
    def answer_each(self) -> bool:
        """Whether every one can be asked for its own answer."""
        names = ("call_utility_all_async", "_call_utility_async")
        return any(hasattr(self._client, name) for name in names)

    async def ask(self, utility: str, *args: Any) -> list[Any]:
        """Call a utility of all engine cores at once; returns one answer per core, in order.

        Each answer comes back under the id of its own call, so that none is taken for another's.

        Raises:
            Exception: The first failure. The other cores are not waited for, and may still do it.
        """
        # Older releases gather in the same way, and keep the first answer.
        if hasattr(self._client, "call_utility_all_async"):
            return list(await self._client.call_utility_all_async(utility, *args))
        one = self._client._call_utility_async  # noqa: SLF001 - the only way in older releases
        return await asyncio.gather(*(one(utility, *args, engine=core) for core in self._engines))
