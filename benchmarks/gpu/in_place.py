"""A trainer that holds no copy of its weights: they change in the files of a checkpoint.

For models of which a host has no room for one more copy.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.checkpoint import Files
from benchmarks.gpu.content import as_ints, gray_step

if TYPE_CHECKING:
    from weightsync_client import Client

__all__ = ["InPlaceTrainer"]

_THREADS = 8


class InPlaceTrainer:
    """Answers as `benchmarks.gpu.trainer.Trainer` does, with fewer ways to hand weights over.

    Args:
        folder: The checkpoint, on tmpfs.
    """

    def __init__(self, folder: str) -> None:
        self._files = Files(Path(folder), writable=True)
        self._client: Client | None = None
        self._changes = 0
        #: Bits by which every value of the present content, and of the files, is not the first.
        self._present, self._written = 0, 0

    def change(self) -> dict[str, Any]:
        """Change every value; contents follow each other as the other trainer's do."""
        self._changes += 1
        self._present ^= gray_step(self._changes)
        return self.write_present()

    def write_first(self) -> dict[str, Any]:
        """Bring the files to what they were at first; the present content is not forgotten."""
        return self._write(0)

    def write_present(self) -> dict[str, Any]:
        """Bring the files to the present content."""
        return self._write(self._present)

    def push(self, address: str) -> dict[str, Any]:
        """Push what lies in the files, with a client that stays open."""
        from weightsync_client import Client

        self._client = self._client or Client(address)
        begin = time.perf_counter()
        pushed = self._client.push(self._files.tensors, delta="never")
        return {
            "version": pushed.version,
            "seconds": time.perf_counter() - begin,
            "size_bytes": pushed.size_bytes,
            "way": pushed.way,
            "way_reason": pushed.way_reason,
        }

    def close(self) -> None:
        """Let go of the files."""
        self._files.close()

    def _write(self, mask: int) -> dict[str, Any]:
        bits, self._written = mask ^ self._written, mask

        def change(tensor: Any) -> None:
            as_ints(tensor).bitwise_xor_(bits)

        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(change, self._files.tensors.values()))
        return {}
