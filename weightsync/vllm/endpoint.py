"""The endpoint plugin: serves the bridge on a unix socket inside vLLM's API process.

vLLM loads it only when VLLM_PLUGINS names it, for which `weightsync` is enough: both of our plugins
have that name.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsync.engine import EngineState
from weightsync.host_dirs import make_dir, run_dir
from weightsync.vllm.bridge.readiness_gate import ReadinessGate, starting
from weightsync.vllm.env import EngineSettings
from weightsync.vllm.extensions import inner_middlewares, outer_middlewares, update_makers
from weightsync.wire.grpc_channels import generic_only
from weightsync.wire.socket_server import claimed, umask

if TYPE_CHECKING:
    import grpc

    from weightsync.vllm.bridge.adapter import VllmEngine
    from weightsync.vllm.bridge.embedded import EmbeddedEngine

__all__ = ["BridgePlugin", "create", "launch", "serve"]

logger = logging.getLogger(__name__)

_SOCKET_MODE = 0o660
#: While the socket is made: folders that other threads of vLLM make meanwhile stay of use.
_UMASK = 0o007


class BridgePlugin:
    """vLLM's EndpointPlugin protocol; the engine is paused before HTTP listens."""

    name = "weightsync"
    required_tasks = None

    def __init__(self) -> None:
        self._condition: Callable[[], tuple[EngineState, str]] = starting
        self._inner, self._outer = inner_middlewares(), outer_middlewares()
        self._server: grpc.aio.Server | None = None
        self._engine: VllmEngine | None = None
        self._socket = ""
        self._end_calls: Callable[[], None] = lambda: None

    def attach_router(self, app: Any) -> None:
        """Put the gate before all routes; extensions come behind it, and before it."""
        for middleware in self._inner:
            app.add_middleware(middleware.wrap)
        app.add_middleware(ReadinessGate, condition=lambda: self._condition())  # noqa: PLW0108 - it is replaced
        for middleware in self._outer:
            app.add_middleware(middleware.wrap)
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
        """Pause the engine and serve EngineService."""
        del state
        if engine_client is None or getattr(engine_client, "weightsync_hosted", False):
            # No engine, or one that weightsync-server hosts itself, with a gate of its own.
            self._condition = lambda: (EngineState.SERVING, "")
            return
        count = getattr(args, "api_server_count", None) or 1
        if count > 1:
            raise RuntimeError(
                f"weightsync needs one API server process, not {count} (vllm serve starts one per "
                "data parallel rank by itself); pass --api-server-count 1"
            )
        from vllm import __version__ as vllm_version

        from weightsync.vllm.bridge.adapter import VllmEngine

        settings = EngineSettings.load()
        self._engine = VllmEngine(engine_client, vllm_version, "bridge", update_makers())
        await self._engine.start()
        for middleware in (*self._outer, *self._inner):
            middleware.start(engine_client, self._engine.live, settings)
        await self._serve(self._engine, settings)

    async def stop(self) -> None:
        """Close the socket; the engine keeps its state."""
        if self._server is not None:
            self._end_calls()
            await self._server.stop(grace=1.0)
            self._server = None
            _remove(self._socket)
        if self._engine is not None:
            await self._engine.close()

    async def _serve(self, engine: VllmEngine, settings: EngineSettings) -> None:
        import grpc

        from weightsync.engine.v1 import engine_pb2_grpc
        from weightsync.vllm.bridge.engine_servicer import EngineServicer

        server = generic_only(grpc.aio.server())
        servicer = EngineServicer(engine, settings.segment_socket)
        engine_pb2_grpc.add_EngineServiceServicer_to_server(servicer, server)
        _bind(server, settings.engine_socket)
        self._socket = settings.engine_socket
        self._end_calls, self._condition = servicer.close, servicer.condition
        await server.start()
        self._server = server
        logger.info("weightsync: bridge listens on unix:%s", self._socket)


def _remove(path: str) -> None:
    Path(path).unlink(missing_ok=True)


def _bind(server: grpc.aio.Server, path: str) -> None:
    folder = Path(path).parent
    if folder == run_dir():
        # The server and vLLM start in either order.
        make_dir(folder)
    with (
        claimed(path, "set WEIGHTSYNC_ENGINE_SOCKET to another path"),
        umask(_UMASK),
    ):
        server.add_insecure_port(f"unix:{path}")
    Path(path).chmod(_SOCKET_MODE)


def create() -> BridgePlugin:
    """The factory named by our entry point."""
    return BridgePlugin()


async def serve(llm: Any) -> BridgePlugin:
    """Pause an AsyncLLM of your own process and serve its bridge, as `vllm serve` does.

    A weightsync-server beside it then proves its weights and lets it generate. Await `stop` of what
    this returns before the AsyncLLM is shut down. Call this on the loop of `llm`, vLLM's AsyncLLM.

    Raises:
        WeightSyncError: The socket is another engine's, or cannot be made.
    """
    bridge = BridgePlugin()
    await bridge.init_state(llm, None, None)
    return bridge


async def launch(flags: Sequence[str], segment_socket: str = "") -> EmbeddedEngine:
    """See EmbeddedEngine.launch; with what its HTTP API has beside a bridge."""
    from weightsync.vllm.bridge.embedded import EmbeddedEngine

    return await EmbeddedEngine.launch(flags, segment_socket, update_makers(), inner_middlewares())
