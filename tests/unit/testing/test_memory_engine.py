"""What the in-memory engine does as a rank of vLLM does it."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

from weightsync.engine import EngineState, SwitchOrder
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


class Wrong(Held):
    """Writes something else the first time."""

    def write(self, tensors: Mapping[str, bytes]) -> None:
        first = not self.begun.is_set()
        super().write(tensors)
        if first:
            self.live["a"] = b"mix?"


async def test_a_switch_whose_caller_has_gone_ends_on_one_version(tmp_path: Path) -> None:
    engine = Wrong(tmp_path)
    for number in (1, 2):
        engine._prepared[str(number)] = _Prepared(str(number), {"a": bytes([number]) * 4})
    engine.live, engine._content, engine._dirty = {"a": b"\1" * 4}, "1", False
    engine._condition = EngineState.SERVING
    order = SwitchOrder("2", "1", 2, "2", "1", 5.0)
    switch = asyncio.create_task(engine.switch(order))
    await asyncio.to_thread(engine.begun.wait, 20)
    # As a server does that dies.
    switch.cancel()
    await asyncio.gather(switch, return_exceptions=True)
    state = asyncio.create_task(engine.call_workers("weightsync_state", {}))
    await asyncio.sleep(0.05)
    assert not state.done()
    engine.go.set()
    assert (await state)[0]["content_digest"] == "1"
    assert engine.live == {"a": b"\1" * 4}
    assert engine.version == 0
