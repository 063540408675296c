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
    except (TimeoutError, EOFError, OSError) as error:
        raise WeightSyncError(
            Reason.ENGINE_AWAY,
            f"{what} did not arrive on {path} ({error!r}); share its folder",
        ) from error
    finally:
        future.cancel()
    try:
        yield files
    finally:
        for _, _, fd in files:
            os.close(fd)
