"""Server-sent events: JSON objects as they come, and a sign of life where none does."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Self

from weightsync.errors import WeightSyncError
from weightsync_server.http_api.http_replies import error_document

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

__all__ = ["EventStream"]

#: Seconds without an event after which a comment is sent: proxies end connections that are silent.
_SILENCE_S = 10.0
_COMMENT = b":\n\n"


class EventStream:
    """Yields one event for each message; a failure is the last one, with its sentence in it.

    Args:
        first: The first message.
        others: Those that follow; closed with this.
        document: Makes JSON of a message.
    """

    def __init__(
        self,
        first: Any,
        others: AsyncGenerator[Any, None],
        document: Callable[[Any], Mapping[str, Any]],
    ) -> None:
        self._first: Any = first
        self._others = others
        self._document = document
        self._next: asyncio.Future[Any] | None = None
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """Return the next event, or a comment."""
        if self._ended:
            raise StopAsyncIteration
        if self._first is not None:
            message, self._first = self._first, None
            return _event(self._document(message))
        self._next = self._next or asyncio.ensure_future(anext(self._others, None))
        done, _ = await asyncio.wait([self._next], timeout=_SILENCE_S)
        if not done:
            return _COMMENT
        found, self._next = self._next, None
        try:
            message = found.result()
        except WeightSyncError as error:
            self._ended = True
            return _event(error_document(error))
        if message is None:
            raise StopAsyncIteration
        return _event(self._document(message))

    async def aclose(self) -> None:
        """End what makes the messages."""
        self._ended = True
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait([self._next])
        await self._others.aclose()


def _event(document: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"
