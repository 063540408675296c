"""What is to be measured, and what every part needs for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import limits
from benchmarks.gpu.cleanup import end_processes, scratch
from benchmarks.gpu.results import Results
from benchmarks.gpu.shape import Shape

__all__ = ["Order", "child_line", "needs_gpus", "sockets", "take_limits"]

_LIMITS_S = 120.0


@dataclass(frozen=True)
class Order:
    """What to measure.

    Attributes:
        shape: Of the model.
        device: `cuda` or `cpu`.
        rounds: How many of each.
        requests: Running all the time.
        executor: vLLM's distributed_executor_backend.
        small: Whether the model is tiny.
        kinds: Of models, by name.
    """

    shape: Shape
    device: str
    rounds: int
    requests: int
    executor: str
    small: bool
    kinds: tuple[str, ...] = ()

    @property
    def flags(self) -> list[str]:
        """Of a process that measures with the same."""
        found = ["--device", self.device, "--rounds", str(self.rounds), "--json"]
        found += ["--requests", str(self.requests), "--executor", self.executor]
        return [*found, *(["--small"] if self.small else [])]


@contextlib.contextmanager
def sockets() -> Iterator[Path]:
    """Make a folder for the block whose path is short enough for sockets."""
    with scratch(Path(tempfile.gettempdir())) as folder:
        yield folder


async def take_limits(order: Order, results: Results) -> None:
    """Measure the limits in a process of its own, which gives the device's memory back."""
    with results.attempt("limits"):
        line = await child_line("limits", order.flags, _LIMITS_S)
        results.facts |= {name: line[name] for name in limits.FIGURES if name in line}
        results.errors += [f"limits: {error}" for error in line["errors"]]


async def child_line(part: str, flags: list[str], seconds: float) -> dict[str, Any]:
    """Return what a part prints in a process of its own.

    Raises:
        TimeoutError: It takes longer, and was ended.
        RuntimeError: It printed nothing.
    """
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "benchmarks.gpu", "--part", part, *flags),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(seconds):
            output, _ = await child.communicate()
    except TimeoutError:
        end_processes(child.pid)
        await child.wait()
        raise
    lines = output.decode().splitlines()
    if not lines:
        msg = f"{part} printed nothing and ended with {child.returncode}"
        raise RuntimeError(msg)
    line: dict[str, Any] = json.loads(lines[-1])
    return line


def needs_gpus(order: Order, count: int) -> None:
    """Refuse a part that this host has too few GPUs for.

    Raises:
        RuntimeError: It has.
    """
    import torch

    found = torch.cuda.device_count() if order.device == "cuda" else 0
    if found < count:
        msg = f"this part needs {count} GPUs, and this host has {found}"
        raise RuntimeError(msg)
