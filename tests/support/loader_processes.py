"""The loader processes beside the ranks of a real vLLM."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from tests.support.vllm_server import VllmServer

__all__ = ["loaders_of", "wait_for_loaders", "wait_gone"]

_LOADER = "weightsync.vllm.shadow.loader_main"


def loaders_of(vllm: VllmServer) -> list[psutil.Process]:
    """Return the loaders of a vLLM."""
    assert vllm.process is not None
    children = psutil.Process(vllm.process.pid).children(recursive=True)
    return [child for child in children if _LOADER in _command(child)]


def wait_gone(loaders: list[psutil.Process], seconds: float) -> None:
    """Return when they have ended; fail if they have not in that time."""
    _, left = psutil.wait_procs(loaders, seconds)
    assert not left


def wait_for_loaders(vllm: VllmServer, count: int, seconds: float = 30.0) -> None:
    """Return when so many loaders run; fail if they do not in that time."""
    end = time.monotonic() + seconds
    while len(loaders_of(vllm)) != count:
        assert time.monotonic() < end
        time.sleep(0.05)


def _command(process: psutil.Process) -> list[str]:
    """Return how a process was started; empty when it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []
