"""The benchmark's end of the pipe to the trainer's process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

__all__ = ["TrainerLink", "training"]

_LINE = 1 << 24
_STOP_S = 20.0


class TrainerLink:
    """Asks the trainer to do something and waits for its answer.

    Args:
        process: The trainer.
        start_s: Longest time until it has loaded its checkpoint.
    """

    def __init__(self, process: asyncio.subprocess.Process, start_s: float) -> None:
        self._process = process
        self._start_s = start_s
        self._ready = False
        self._turn = asyncio.Lock()

    async def ready(self) -> None:
        """Return when it has loaded its checkpoint.

        Raises:
            TimeoutError: It takes too long.
        """
        async with self._turn:
            await self._until_ready()

    async def do(self, what: str, **arguments: Any) -> dict[str, Any]:
        """Return the trainer's answer.

        Raises:
            RuntimeError: It failed, or is gone.
        """
        writer = self._process.stdin
        assert writer is not None
        async with self._turn:
            await self._until_ready()
            writer.write(json.dumps({"do": what, **arguments}).encode() + b"\n")
            await writer.drain()
            return await self._answer()

    async def _until_ready(self) -> None:
        if not self._ready:
            async with asyncio.timeout(self._start_s):
                await self._answer()
            self._ready = True

    async def _answer(self) -> dict[str, Any]:
        reader = self._process.stdout
        assert reader is not None
        line = await reader.readline()
        if not line:
            msg = "the trainer's process has ended"
            raise RuntimeError(msg)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            msg = f"trainer: {answer['error']}"
            raise RuntimeError(msg)
        return answer


@contextlib.asynccontextmanager
async def training(
    device: str, checkpoint: Path, start_s: float, *, wait: bool = True
) -> AsyncIterator[TrainerLink]:
    """Run a trainer until the block ends.

    Args:
        device: Where its weights lie.
        checkpoint: What it begins with.
        start_s: Longest time until it has loaded it.
        wait: Until then; else the first question waits.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "benchmarks.gpu.trainer", device, str(checkpoint)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LINE,
    )
    try:
        link = TrainerLink(process, start_s)
        if wait:
            await link.ready()
        yield link
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
