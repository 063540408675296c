"""Files that an engine sends over the segment socket when it is asked to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.engine.ranks import QUICK_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from concurrent.futures import Future

    from weightsync.shm.segment_socket import OfferedFile, SegmentServer

__all__ = ["offered"]


@contextlib.asynccontextmanager
async def offered(
    segments: SegmentServer, ask: Callable[[str, str], Awaitable[object]], what: str
) -> AsyncIterator[Sequence[OfferedFile]]:
    """Give the files that an engine offers, closed after the block.

    Args:
        segments: Where they come.
        ask: Has the engine send them, given the path of the socket and the name of the offer.
        what: What they are, for the sentence.

    Raises:
        WeightSyncError: ENGINE_AWAY: they did not come. Or as `ask`.
    """
    offer = f"offer-{secrets.token_hex(8)}"
    future = segments.expect_offer(offer)
    path = str(segments.path)
    try:
        await ask(path, offer)
        async with asyncio.timeout(QUICK_S):
            files = await asyncio.wrap_future(future)
    except BaseException as error:
        # They may have come all the same, or come now.
        if not future.cancel():
            future.add_done_callback(_close_unused)
        if isinstance(error, (TimeoutError, EOFError, OSError)):
            raise WeightSyncError(
                Reason.ENGINE_AWAY,
                f"{what} did not arrive on {path} ({error!r}); share its folder",
            ) from error
        raise
    try:
        yield files
    finally:
        _close(files)


def _close_unused(future: Future[list[OfferedFile]]) -> None:
    if not future.cancelled() and future.exception() is None:
        _close(future.result())


def _close(files: Sequence[OfferedFile]) -> None:
    for _, _, fd in files:
        os.close(fd)
