"""What an engine sends over the segment socket, where it does not arrive."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.segment_socket import SegmentServer
from weightsync_server.engine.file_offers import offered_by_each

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("code", "reason", "remedy"),
    [
        (errno.EMFILE, Reason.DISK_EXHAUSTED, "raise the limit on open files"),
        (errno.ECONNRESET, Reason.ENGINE_AWAY, "share its folder"),
    ],
)
async def test_what_does_not_arrive_says_what_helps(
    tmp_path: Path, code: int, reason: Reason, remedy: str
) -> None:
    segments = SegmentServer(tmp_path / "s")

    async def ask() -> None:
        segments._offers["o"].set_exception(OSError(code, os.strerror(code)))

    try:
        with pytest.raises(WeightSyncError, match=remedy) as caught:
            async with offered_by_each(segments, ["o"], ask, "the memory"):
                pytest.fail("nothing was offered")
    finally:
        segments.close()
    assert caught.value.reason is reason
