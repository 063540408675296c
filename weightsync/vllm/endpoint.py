"""The endpoint plugin: serves the bridge on a unix socket inside vLLM's API process.

vLLM loads it only when VLLM_PLUGINS names it, and that list holds for all plugin groups; both of
ours are named `weightsync`, so VLLM_PLUGINS=weightsync is enough.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsync.engine import EngineState
from weightsync.vllm.gate import Gate, GateState
from weightsync.vllm.settings import EngineSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import grpc

    from weightsync.vllm.adapter import VllmEngine

__all__ = ["Bridge", "create"]

logger = logging.getLogger(__name__)

_SOCKET_MODE = 0o660
#: sun_path of unix(7), less its final zero.
_MAX_SOCKET_PATH = 107


class Bridge:
    """vLLM's EndpointPlugin protocol. The engine is paused before HTTP listens.

    Attributes:
        name: For vLLM's logs and VLLM_PLUGINS.
        required_tasks: None: any model.
    """

    name = "weightsync"
    required_tasks = None

    def __init__(self) -> None:
        self._gate = GateState()
        self._server: grpc.aio.Server | None = None
        self._engine: VllmEngine | None = None
        self._socket = ""

    def attach_router(self, app: Any) -> None:
        """Put the gate before all routes; there are no routes of our own."""
        app.add_middleware(Gate, state=self._gate)
        inner = app.router.lifespan_context

        @contextlib.asynccontextmanager
        async def lifespan(app: Any) -> AsyncIterator[Any]:
            try:
                async with inner(app) as state:
                    yield state
            finally:
                await self.stop()

        app.router.lifespan_context = lifespan

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Pause the engine and serve EngineService.

        Raises:
            RuntimeError: There are several API server processes, or the socket is taken.
        """
        del state
        if engine_client is None or getattr(engine_client, "weightsync_hosted", False):
            # No engine, or one that weightsync-server hosts itself, with a gate of its own.
            self._gate.condition = lambda: (EngineState.SERVING, "")
            return
        count = getattr(args, "api_server_count", None) or 1
        if count > 1:
            msg = f"weightsync needs one API server process, not {count}; pass --api-server-count 1"
            raise RuntimeError(msg)
        from vllm import __version__ as vllm_version

        from weightsync.vllm.adapter import VllmEngine

        settings = EngineSettings.load()
        self._engine = VllmEngine(engine_client, vllm_version, "bridge")
        await self._engine.start()
        self._gate.condition = self._engine.condition
        await self._serve(self._engine, settings)

    async def stop(self) -> None:
        """Close the socket; the engine keeps its state."""
        if self._server is not None:
            await self._server.stop(grace=1.0)
            self._server = None
            _remove(self._socket)
        if self._engine is not None:
            await self._engine.close()

    async def _serve(self, engine: VllmEngine, settings: EngineSettings) -> None:
        import grpc

        from weightsync.engine.v1 import engine_pb2_grpc
        from weightsync.vllm.service import EngineServicer

        self._socket = settings.engine_socket
        _claim(self._socket)
        server = grpc.aio.server()
        servicer = EngineServicer(engine, settings.segment_socket)
        engine_pb2_grpc.add_EngineServiceServicer_to_server(servicer, server)
        server.add_insecure_port(f"unix:{self._socket}")
        await server.start()
        os.chmod(self._socket, _SOCKET_MODE)  # noqa: PTH101 - a call on a local socket file
        self._server = server
        logger.info("weightsync: bridge listens on unix:%s", self._socket)


def _remove(path: str) -> None:
    Path(path).unlink(missing_ok=True)


def _claim(path: str) -> None:
    """Remove the socket file of a dead engine.

    Raises:
        RuntimeError: Another engine listens there, or the path cannot hold a socket.
    """
    if not Path(path).parent.is_dir() or len(path.encode()) > _MAX_SOCKET_PATH:
        msg = (
            f"no unix socket can be made at {path}; make its directory, or set "
            f"WEIGHTSYNC_ENGINE_SOCKET to a path of at most {_MAX_SOCKET_PATH} bytes"
        )
        raise RuntimeError(msg)
    if not Path(path).exists():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            _remove(path)
            return
    msg = f"another engine listens on {path}; set WEIGHTSYNC_ENGINE_SOCKET to another path"
    raise RuntimeError(msg)


def create() -> Bridge:
    """Return the plugin object; the factory named by our entry point."""
    return Bridge()
