"""Processes that do all that is heavy: digests, durable writes, reads from stores.

Both are imported on first use, because the child process is a module of this package and must
start without asyncio and subprocess.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightsync_server.workers.fetch.fetch_pool import FetcherPool
    from weightsync_server.workers.fetch.gpu_pool import GpuFetchPool

__all__ = ["FetcherPool", "GpuFetchPool"]


def __getattr__(name: str) -> object:
    if name == "GpuFetchPool":
        from weightsync_server.workers.fetch.gpu_pool import GpuFetchPool

        return GpuFetchPool
    if name == "FetcherPool":
        from weightsync_server.workers.fetch.fetch_pool import FetcherPool

        return FetcherPool
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
