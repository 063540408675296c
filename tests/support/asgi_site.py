"""Serves an ASGI application as vLLM does: by uvicorn, on a port of this host."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any

from benchmarks.servers import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["serving_app"]


@contextlib.contextmanager
def serving_app(app: Any, port: int = 0) -> Iterator[str]:
    """Serve an application in a thread until the block ends; yields its address, a URL.

    Args:
        app: The application.
        port: 0: a free one.
    """
    import uvicorn

    port = port or free_port()
    config = uvicorn.Config(app, "127.0.0.1", port, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    started = threading.Event()
    startup = server.startup

    async def start(*arguments: Any, **more: Any) -> None:
        await startup(*arguments, **more)
        started.set()

    server.startup = start  # type: ignore[method-assign]  # it has no call for this
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    assert started.wait(20)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(20)
