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
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._turn = asyncio.Lock()

    async def do(self, what: str, **arguments: Any) -> dict[str, Any]:
        """Return the trainer's answer.

        Raises:
            RuntimeError: It failed, or is gone.
        """
        writer = self._process.stdin
        assert writer is not None
        async with self._turn:
            writer.write(json.dumps({"do": what, **arguments}).encode() + b"\n")
            await writer.drain()
            return await self.answer()

    async def answer(self) -> dict[str, Any]:
        """Return the next line that the trainer writes."""
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
async def training(device: str, checkpoint: Path, start_s: float) -> AsyncIterator[TrainerLink]:
    """Run a trainer until the block ends.

    Args:
        device: Where its weights lie.
        checkpoint: What it begins with.
        start_s: Longest time until it has loaded it.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "benchmarks.gpu.trainer", device, str(checkpoint)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LINE,
    )
    try:
        link = TrainerLink(process)
        async with asyncio.timeout(start_s):
            await link.answer()
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
