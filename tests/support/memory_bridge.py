"""The in-memory engine behind a real bridge socket, in a thread of the test."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any, cast

import grpc

from weightsync.engine.v1 import engine_pb2_grpc
from weightsync.testing import MemoryEngine
from weightsync.vllm.bridge.engine_servicer import EngineServicer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

__all__ = ["memory_bridge"]


@contextlib.contextmanager
def memory_bridge(
    run_dir: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]],
    engine_of: Callable[..., MemoryEngine] = MemoryEngine,
    socket: Path | None = None,
) -> Iterator[Any]:
    """Serve an engine until the block ends.

    Args:
        run_dir: Folder of the server's sockets.
        tensors: The checkpoint: name to (dtype, shape, bytes).
        engine_of: Makes it, of these tensors and the segment socket.
        socket: Of the bridge; None: `run_dir`/engine.sock.
    """
    bridge = socket or run_dir / "engine.sock"
    segments = run_dir / "segments.sock"
    engine = engine_of(tensors, segments)
    loop = asyncio.new_event_loop()
    started, over = threading.Event(), asyncio.Event()

    async def serve() -> None:
        server = grpc.aio.server()
        servicer = EngineServicer(cast("Any", engine), str(segments))
        engine_pb2_grpc.add_EngineServiceServicer_to_server(servicer, server)
        server.add_insecure_port(f"unix:{bridge}")
        await server.start()
        started.set()
        await over.wait()
        await server.stop(None)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), name="engine")
    thread.start()
    try:
        assert started.wait(10)
        yield engine
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()
