"""For how long a transaction waits for its trainer, and who else ends it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import attach_pb2 as pb
from weightsync_server.attach.in_place import TransactionStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


async def _renews() -> AsyncIterator[pb.WriteInPlaceRequest]:
    """A trainer that says again and again that it is at work."""
    while True:
        yield pb.WriteInPlaceRequest(renew=pb.RenewInPlace())
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("longest_s", "breaks", "why"), [(0.2, False, "too late"), (30.0, True, "because")]
)
async def test_no_renewal_keeps_a_step_waiting_for_ever(
    longest_s: float, why: str, *, breaks: bool
) -> None:
    line = TransactionStream(_renews())
    if breaks:
        asyncio.get_running_loop().call_later(0.05, line.break_off, "because")
    with pytest.raises(WeightSyncError, match=why) as caught:
        await line.step("commit", 5.0, longest_s, "too late")
    assert caught.value.reason is Reason.APPLY_RESTORED
    await line.close()


async def _says(*steps: pb.WriteInPlaceRequest) -> AsyncIterator[pb.WriteInPlaceRequest]:
    for step in steps:
        yield step


async def test_a_trainer_that_has_nothing_more_to_say_is_heard_to_its_end() -> None:
    commit = pb.WriteInPlaceRequest(commit=pb.CommitInPlace())
    copied = pb.WriteInPlaceRequest(copied=pb.CopiedInPlace())
    line = TransactionStream(_says(commit, copied))
    await line.step("commit", 5.0, 5.0, "too late")
    await line.step("copied", 5.0, 5.0, "too late")
    with pytest.raises(WeightSyncError, match="the trainer has exited"):
        await line.step("copied", 5.0, 5.0, "too late")
    await line.close()


async def test_what_ends_it_before_a_step_is_awaited_is_kept() -> None:
    line = TransactionStream(_renews())
    line.break_off("because")
    line.break_off("of another reason")
    assert line.over == "because"
    with pytest.raises(WeightSyncError, match="because"):
        await line.step("commit", 5.0, 5.0, "too late")
    await line.close()


async def test_what_a_trainer_says_while_it_waits_for_the_engine_is_bounded() -> None:
    said = 0

    async def renews() -> AsyncIterator[pb.WriteInPlaceRequest]:
        nonlocal said
        while True:
            said += 1
            yield pb.WriteInPlaceRequest(renew=pb.RenewInPlace())

    line = TransactionStream(renews())
    for _ in range(100):
        await asyncio.sleep(0)
    assert said == 2
    await line.close()
    assert line.over == "the trainer has exited"
