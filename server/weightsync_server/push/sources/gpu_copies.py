"""What is being copied from a trainer's GPUs for one connection, and what that tells of it."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.incoming_version import HANDLE_BYTES
from weightsync_server.push.state import check_open
from weightsync_server.push.task_set import start_task
from weightsync_server.push.validation import refused

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from weightsync.shm.segments import Segment
    from weightsync_server.push.parts import Push
    from weightsync_server.workers.fetch.fetch_api import GpuSource

__all__ = ["GpuCopier", "GpuCopies", "Placement", "placement"]

logger = logging.getLogger(__name__)

_DEVICE = re.compile(r"[0-9a-f]{32}")
_HANDLE = re.compile(rf"[0-9a-f]{{{2 * HANDLE_BYTES}}}")


class GpuCopier(Protocol):
    """Copies from GPUs; `weightsync_server.workers.fetch.gpu_pool.GpuFetchPool` does."""

    async def collect(self, segment: Segment, source: GpuSource) -> None:
        """See `weightsync_server.workers.fetch.fetch_api.FetchApi.collect`."""


class Placement(NamedTuple):
    """Where a trainer says that tensors lie.

    Attributes:
        device: UUID of the GPU, hexadecimal.
        handles: Open allocations, hexadecimal.
        places: Of each tensor: the number of its handle, its offset in bytes.
    """

    device: str
    handles: Sequence[str]
    places: Sequence[tuple[int, int]]


class GpuCopies:
    """The copies of one connection, each of a shard or of what one writer brings of it.

    Attributes:
        trainer: Names whose memory it is.
    """

    def __init__(self) -> None:
        self.trainer = secrets.token_hex(8)
        #: Devices from which something was copied.
        self._reached: set[str] = set()
        #: What was begun last, by shard.
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._running: set[asyncio.Task[None]] = set()

    def start(self, shard: int, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin to copy, whether the trainer asks for its outcome or not."""
        task = self._tasks[shard] = start_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def declined(self, push: Push, shard: int, device: str) -> str:
        """Wait for the first copy from a device: what it meets, the others would.

        Returns:
            Why the device cannot be reached from here; then the copy counts as not begun. Or "".

        Raises:
            WeightSyncError: Why the push, or the copy, has failed.
        """
        if device in self._reached:
            return ""
        try:
            await self.ended(push, shard)
        except WeightSyncError as error:
            if error.reason is not Reason.NOT_SUPPORTED:
                raise
            del self._tasks[shard]
            logger.info("a trainer writes its tensors itself: %s", error.message)
            return error.message
        self._reached.add(device)
        return ""

    async def ended(self, push: Push, shard: int) -> None:
        """Return once a shard was copied; raise why it was not, and first of all why the push.

        Raises:
            WeightSyncError: REQUEST_INVALID where that was not begun.
        """
        task = self._tasks.get(shard)
        if task is None:
            raise refused(f"shard {shard} is not being copied; ask for that first")
        await asyncio.wait([task])
        check_open(push.state)
        task.result()

    async def cease(self) -> None:
        """Call off what is under way, and return once nothing is written any more."""
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def placement(shard: int, count: int, where: dict[str, Any]) -> Placement:
    """Return where the tensors of a shard lie: checked for its form, and believed no further.

    Args:
        shard: Its index.
        count: Of its tensors, or boxes, that are not empty.
        where: As the trainer says.

    Raises:
        WeightSyncError: REQUEST_INVALID.
    """
    device, handles, places = (where.get(key) for key in ("device", "handles", "places"))
    if (
        isinstance(device, str)
        and _DEVICE.fullmatch(device)
        and isinstance(handles, list)
        and len(handles) <= count
        and all(isinstance(handle, str) and _HANDLE.fullmatch(handle) for handle in handles)
        and isinstance(places, list)
        and len(places) == count
        and all(_is_place(place, len(handles)) for place in places)
    ):
        return Placement(device, handles, [(place[0], place[1]) for place in places])
    raise refused(
        f"shard {shard} needs a device, handles of {HANDLE_BYTES} bytes, and for each of its "
        f"{count} tensors that are not empty a number of a handle and an offset"
    )


def _is_place(place: object, handles: int) -> bool:
    # Not isinstance: true and false are no numbers here.
    if not isinstance(place, list) or [type(value) for value in place] != [int, int]:
        return False
    return bool(0 <= place[0] < handles and 0 <= place[1] < 1 << 63)
