"""The tasks of one push, each of which is awaited before the push frees what it works on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from weightsync.model.manifest import Manifest
    from weightsync.v1 import weightsync_pb2 as pb

__all__ = ["TaskSet", "is_running", "start_task"]

_T = TypeVar("_T")


@dataclass(slots=True)
class TaskSet:
    """What is under way in a push as a whole. What is under way in a shard, the shard knows.

    Attributes:
        opening: Gets it its slot; None: an earlier life of the server did.
        resuming: Gets it its slot again, after it was suspended.
        suspending: Makes what came durable, then gives its slot back.
        sealing: Makes its manifest, once all bytes are proved.
        committing: Commits it.
        closing: Frees everything of one that failed.
    """

    opening: asyncio.Task[None] | None = None
    resuming: asyncio.Task[None] | None = None
    suspending: asyncio.Task[None] | None = None
    sealing: asyncio.Task[Manifest] | None = None
    committing: asyncio.Task[pb.CommitPushResponse] | None = None
    closing: asyncio.Task[None] | None = None


def start_task(work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
    """Return a task whose error nobody has to ask for: whoever would may be gone."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    return task


def is_running(task: asyncio.Task[_T] | None) -> TypeGuard[asyncio.Task[_T]]:
    """Return whether a task is there and has not ended."""
    return task is not None and not task.done()
