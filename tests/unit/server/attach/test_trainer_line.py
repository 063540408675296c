"""For how long a transaction waits for its trainer, and who else ends it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import attach_pb2 as pb
from weightsync_server.attach.trainer_line import TrainerLine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


async def _renews() -> AsyncIterator[pb.WriteInPlaceRequest]:
    """A trainer that says again and again that it is at work."""
    while True:
        yield pb.WriteInPlaceRequest(renew=pb.RenewInPlace())
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("longest_s", "breaks", "why"),
    [(0.2, False, r"stood still for 0\.2 s, which is --in-place-pause-s"), (None, True, "because")],
)
async def test_no_renewal_keeps_a_block_open_for_ever(
    longest_s: float | None, why: str, *, breaks: bool
) -> None:
    line = TrainerLine(_renews())
    if breaks:
        asyncio.get_running_loop().call_later(0.05, line.break_off, "because")
    with pytest.raises(WeightSyncError, match=why) as caught:
        await line.step("commit", 5.0, longest_s)
    assert caught.value.reason is Reason.APPLY_RESTORED
    await line.close()
