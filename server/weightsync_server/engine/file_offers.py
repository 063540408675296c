"""Files that an engine sends over the segment socket when it is asked to."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future

from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.segment_socket import OfferedFile, SegmentServer
from weightsync_server.engine.ranks import QUICK_S
from weightsync_server.ops.os_errors import write_fault


@contextlib.asynccontextmanager
async def offered(
    segments: SegmentServer, ask: Callable[[str, str], Awaitable[object]], what: str
) -> AsyncIterator[Sequence[OfferedFile]]:
    """Give the files that an engine offers, closed after the block.

    `ask` gets the path of the socket and the name of the offer; `what` is for the error.
    """
    offer = f"offer-{secrets.token_hex(8)}"
    path = str(segments.path)
    async with offered_by_each(segments, [offer], lambda: ask(path, offer), what) as (files,):
        yield files


@contextlib.asynccontextmanager
async def offered_by_each(
    segments: SegmentServer,
    offers: Sequence[str],
    ask: Callable[[], Awaitable[object]],
    what: str,
) -> AsyncIterator[Sequence[Sequence[OfferedFile]]]:
    """Give the files of several offers, in order, closed after the block; see `offered`."""
    futures = [segments.expect_offer(offer) for offer in offers]
    try:
        await ask()
        async with asyncio.timeout(QUICK_S):
            files = [await asyncio.wrap_future(future) for future in futures]
    except BaseException as error:
        # They may have come all the same, or come now.
        for future in futures:
            if not future.cancel():
                future.add_done_callback(_close_unused)
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise write_fault(error, f"receiving {what}") from error
        if isinstance(error, (TimeoutError, EOFError, OSError)):
            raise WeightSyncError(
                Reason.ENGINE_AWAY,
                f"{what} did not arrive on {segments.path} ({error!r}); share its folder",
            ) from error
        raise
    try:
        yield files
    finally:
        for some in files:
            _close(some)


def _close_unused(future: Future[list[OfferedFile]]) -> None:
    if not future.cancelled() and future.exception() is None:
        _close(future.result())


def _close(files: Sequence[OfferedFile]) -> None:
    for _, _, fd in files:
        os.close(fd)
