"""Leases of pauses when this process, or a clock, stands still."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.clocks import Clocks
from tests.unit.vllm.bridge.test_adapter import DIGEST, Llm, _refused, _serving, _state, _until
from weightsync.engine import EngineState, PauseSpec
from weightsync.errors import Reason
from weightsync.vllm.bridge.pause_lease import PauseLease

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync.vllm.bridge.adapter import VllmEngine


def _renewed(engine: VllmEngine, lease: str) -> object:
    return engine.renew(lease, 60)


def _resumed(engine: VllmEngine, lease: str) -> object:
    return engine.resume(lease, 8, DIGEST)


@pytest.mark.parametrize("again", [_renewed, _resumed])
async def test_a_process_that_stood_still_past_its_lease_finds_it_gone(
    again: Callable[[VllmEngine, str], object],
) -> None:
    llm = Llm()
    engine = await _serving(llm)
    lease = await engine.pause(PauseSpec(), 0.05)
    # As by SIGSTOP: no timer runs. What came from the server meanwhile is read first.
    time.sleep(0.1)  # noqa: ASYNC251 - the loop itself must stand still
    error = await _refused(again(engine, lease.lease_id))
    assert error.reason is Reason.ENGINE_REFUSED
    assert "not the present one" in error.message
    # It ends as without a server: on what every rank holds, with its own label.
    await _until(lambda: _state(engine) is EngineState.SERVING)
    assert llm.log[-2:] == ["label 7", "resume"]


async def test_what_was_committed_keeps_its_label_when_nobody_resumes() -> None:
    llm = Llm()
    engine = await _serving(llm)
    llm.digests = ["b" * 32] * 2
    await engine.pause(PauseSpec(), 0.1)
    await engine.call_workers("weightsync_commit", {"apply_id": "x", "version": 8})
    await _until(lambda: _state(engine) is EngineState.SERVING)
    assert llm.log[-2:] == ["label 8", "resume"]


async def test_a_server_that_tells_no_version_loses_no_label() -> None:
    llm = Llm()
    engine = await _serving(llm)
    await engine.pause(PauseSpec(), 0.1)
    await engine.call_workers("weightsync_commit", {"apply_id": "x"})
    await _until(lambda: _state(engine) is EngineState.SERVING)
    assert llm.log[-2:] == ["label 7", "resume"]


async def test_the_wall_clock_moves_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks.over(monkeypatch)
    ended: list[str] = []
    lease = PauseLease(ended.append)
    held = lease.take(60)
    for jump in (-3600, 86_400):
        clocks.wall += jump
        assert lease.holds(held)
    clocks.monotonic += 59
    assert lease.holds(held)
    clocks.monotonic += 1
    assert not lease.holds(held)
    lease.renew(5)
    assert lease.holds(held)
    lease.drop()
    assert not lease.holds(held)
    assert not lease.holds("")
    await asyncio.sleep(0)
    assert ended == []
