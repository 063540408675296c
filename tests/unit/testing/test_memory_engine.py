"""What the in-memory engine does as a rank of vLLM does it."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

from weightsync.testing import MemoryEngine
from weightsync.testing.memory_rank import _Prepared

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Held(MemoryEngine):
    """Waits in its first write."""

    def __init__(self, folder: Path) -> None:
        super().__init__({"a": ("U8", (4,), bytes(4))}, folder / "no.sock")
        self.begun, self.go = threading.Event(), threading.Event()
        self.written: list[bytes] = []

    def write(self, tensors: Mapping[str, bytes]) -> None:
        if not self.begun.is_set():
            self.begun.set()
            assert self.go.wait(20)
        self.written += tensors.values()
        super().write(tensors)


async def test_a_commit_whose_caller_has_gone_is_before_what_is_asked_later(tmp_path: Path) -> None:
    engine = Held(tmp_path)
    for number in (1, 2):
        engine._prepared[str(number)] = _Prepared(str(number), {"a": bytes([number]) * 4})
    first = asyncio.create_task(engine.call_workers("weightsync_commit", {"apply_id": "1"}))
    await asyncio.to_thread(engine.begun.wait, 20)
    # As a server does that dies.
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    later = asyncio.create_task(engine.call_workers("weightsync_commit", {"apply_id": "2"}))
    state = asyncio.create_task(engine.call_workers("weightsync_state", {}))
    await asyncio.sleep(0.05)
    assert not later.done()
    assert not state.done()
    engine.go.set()
    assert (await later)[0]["ok"]
    assert engine.written == [b"\1" * 4, b"\2" * 4]
    assert engine.live == {"a": b"\2" * 4}
    assert not (await state)[0]["dirty"]
