"""Calls that ask for the engine: each runs in a task that no RPC owns, and each key runs once."""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, TypeVar

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.engine.idempotency import another

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from google.protobuf.message import Message

__all__ = ["Calls"]

_T = TypeVar("_T")
#: Answers kept for repeated calls.
_ANSWERS = 256
#: Calls that may wait for the engine.
_MAX_WAITING = 32
_MAX_KEY_BYTES = 128


class Calls:
    """Runs calls to their end, whatever becomes of their callers; repeated ones join the first."""

    def __init__(self) -> None:
        # By idempotency key: what was asked, and who answers.
        self._tasks: OrderedDict[str, tuple[Message, asyncio.Task[Any]]] = OrderedDict()
        self._running: set[asyncio.Task[Any]] = set()

    async def run(
        self, key: str, request: Message, start: Callable[[], Coroutine[None, None, _T]]
    ) -> _T:
        """Return the answer of the call with this key, which is started if there is none yet.

        Args:
            key: Idempotency key; empty: the call has none.
            request: What is asked.
            start: Answers it.

        Raises:
            WeightSyncError: REQUEST_INVALID: the key is too long, or came with another request.
                APPLY_BUSY: too many calls wait. Or what the call raises.
        """
        task = self._known(key, request)
        if task is None:
            task = self._begun(key, request, start)
        # Shielded: the caller may go away, the apply goes on.
        answer: _T = await asyncio.shield(task)
        return answer

    async def drain(self) -> None:
        """Wait for calls that are running."""
        while self._running:
            await asyncio.wait(self._running)

    def _begun(
        self, key: str, request: Message, start: Callable[[], Coroutine[None, None, _T]]
    ) -> asyncio.Task[_T]:
        if len(self._running) >= _MAX_WAITING:
            raise WeightSyncError(
                Reason.APPLY_BUSY,
                f"{_MAX_WAITING} calls wait for the engine already; wait for them",
                retry_after_s=1.0,
            )
        task = asyncio.create_task(start())
        self._running.add(task)
        task.add_done_callback(functools.partial(self._ended, key))
        if key:
            self._tasks[key] = (request, task)
            while len(self._tasks) > _ANSWERS:
                self._tasks.popitem(last=False)
        return task

    def _known(self, key: str, request: Message) -> asyncio.Task[Any] | None:
        if len(key.encode()) > _MAX_KEY_BYTES:
            raise WeightSyncError(
                Reason.REQUEST_INVALID, f"idempotency_key is over {_MAX_KEY_BYTES} bytes"
            )
        first, task = self._tasks.get(key, (None, None))
        if first is not None and first != request:
            raise another()
        return task

    def _ended(self, key: str, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        # A refusal changed nothing: the same call may do better later.
        keep = error is None or getattr(error, "reason", None) is Reason.APPLY_RESTORED
        if key in self._tasks and self._tasks[key][1] is task and not keep:
            del self._tasks[key]
