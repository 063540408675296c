"""What a trainer and its transaction say to each other."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from weightsync.v1 import attach_pb2 as pb

__all__ = ["TrainerLine", "abandoned"]


class TrainerLine:
    """Both directions of one call of WriteInPlace.

    Args:
        steps: What the trainer sends after it has begun.
    """

    def __init__(self, steps: AsyncIterator[pb.WriteInPlaceRequest]) -> None:
        self._received: asyncio.Queue[pb.WriteInPlaceRequest | str | None] = asyncio.Queue()
        self._answers: asyncio.Queue[pb.WriteInPlaceResponse | None] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read(steps))

    def send(self, answer: pb.WriteInPlaceResponse) -> None:
        """Tell the trainer something, if it is there."""
        self._answers.put_nowait(answer)

    def end(self) -> None:
        """Let `answers` end."""
        self._answers.put_nowait(None)

    async def answers(self) -> AsyncIterator[pb.WriteInPlaceResponse]:
        """Yield what is sent, until `end`."""
        while (answer := await self._answers.get()) is not None:
            yield answer

    def break_off(self, why: str) -> None:
        """Have `step` raise, whatever the trainer does, with a reason."""
        self._received.put_nowait(why)

    async def step(self, wanted: str, lease_s: float, longest_s: float | None = None) -> None:
        """Return when the trainer has done something.

        Args:
            wanted: What, as the messages of the proto call it.
            lease_s: How long it may be silent, seconds.
            longest_s: How long it may take, however often it says that it is at work, seconds;
                None: for ever.

        Raises:
            WeightSyncError: APPLY_RESTORED: it has not, and will not.
        """
        try:
            async with asyncio.timeout(longest_s):
                while (said := await self._said(lease_s)) == "renew":
                    pass
        except TimeoutError:
            raise abandoned(
                f"the engine has stood still for {longest_s:g} s, which is --in-place-pause-s; "
                "compute before, and write only in the block"
            ) from None
        if said != wanted:
            raise abandoned(_ENDS.get(said) or f"the trainer said {said}, not {wanted}")

    async def _said(self, lease_s: float) -> str:
        try:
            async with asyncio.timeout(lease_s):
                step = await self._received.get()
        except TimeoutError:
            raise abandoned(f"the trainer was silent for {lease_s:g} s; raise its lease") from None
        if isinstance(step, str):
            raise abandoned(step)
        return (step.WhichOneof("step") or "") if step is not None else ""

    async def close(self) -> None:
        """Take note that the trainer says nothing more."""
        self._received.put_nowait(None)
        self._reading.cancel()
        # Nobody else may end the stream while it is read.
        await asyncio.wait({self._reading})

    async def _read(self, steps: AsyncIterator[pb.WriteInPlaceRequest]) -> None:
        # However it ends, the trainer says nothing more.
        with contextlib.suppress(Exception):
            async for step in steps:
                self._received.put_nowait(step)
        self._received.put_nowait(None)


def abandoned(why: str) -> WeightSyncError:
    """Return the error of a transaction that comes to nothing."""
    return WeightSyncError(Reason.APPLY_RESTORED, why)


_ENDS = {
    "": "the trainer has gone",
    "abort": "the trainer has taken it back",
    "begin": "begin was sent while it was open; begin once",
}
