"""The endpoint plugin: serves the bridge on a unix socket inside vLLM's API process.

vLLM loads it only when VLLM_PLUGINS names it, and that list holds for all plugin groups; both of
ours are named `weightsync`, so VLLM_PLUGINS=weightsync is enough.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsync.engine import EngineState
from weightsync.vllm.answers.version_header import AnswerState, AnswerVersions
from weightsync.vllm.bridge.readiness_gate import Gate, GateState
from weightsync.vllm.bridge.train_forward import ForwardState, TrainForward
from weightsync.vllm.bridge.upstream import Upstream
from weightsync.vllm.env import EngineSettings
from weightsync.wire.named_methods import generic_only
from weightsync.wire.unix_sockets import claimed, umask

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import grpc

    from weightsync.vllm.bridge.adapter import VllmEngine

__all__ = ["Bridge", "create", "serve"]

logger = logging.getLogger(__name__)

_SOCKET_MODE = 0o660
#: While the socket is made: folders that other threads of vLLM make meanwhile stay of use.
_UMASK = 0o007


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
        self._answers = AnswerState()
        self._forward = ForwardState()
        self._server: grpc.aio.Server | None = None
        self._engine: VllmEngine | None = None
        self._socket = ""
        self._end_calls: Callable[[], None] = lambda: None

    def attach_router(self, app: Any) -> None:
        """Put the gate before all routes, and before it what is passed on to the server."""
        app.add_middleware(AnswerVersions, state=self._answers)
        app.add_middleware(Gate, state=self._gate)
        app.add_middleware(TrainForward, state=self._forward)
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
            RuntimeError: There are several API server processes.
            WeightSyncError: The socket is another engine's, or cannot be made.
        """
        del state
        if engine_client is None or getattr(engine_client, "weightsync_hosted", False):
            # No engine, or one that weightsync-server hosts itself, with a gate of its own.
            self._gate.condition = lambda: (EngineState.SERVING, "")
            return
        count = getattr(args, "api_server_count", None) or 1
        if count > 1:
            msg = (
                f"weightsync needs one API server process, not {count} (vllm serve starts one per "
                "data parallel rank by itself); pass --api-server-count 1"
            )
            raise RuntimeError(msg)
        from vllm import __version__ as vllm_version

        from weightsync.vllm.bridge.adapter import VllmEngine

        settings = EngineSettings.load()
        if settings.server_url:
            self._forward.upstream = Upstream(settings.server_url, settings.server_ca)
        self._engine = VllmEngine(engine_client, vllm_version, "bridge")
        await self._engine.start()
        if settings.answer_versions:
            self._answers.follow(engine_client, self._engine.live)
        self._gate.condition = self._engine.condition
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
        self._end_calls = servicer.close
        await server.start()
        self._server = server
        logger.info("weightsync: bridge listens on unix:%s", self._socket)


def _remove(path: str) -> None:
    Path(path).unlink(missing_ok=True)


def _bind(server: grpc.aio.Server, path: str) -> None:
    with (
        claimed(path, "set WEIGHTSYNC_ENGINE_SOCKET to another path"),
        umask(_UMASK),
    ):
        server.add_insecure_port(f"unix:{path}")
    Path(path).chmod(_SOCKET_MODE)


def create() -> Bridge:
    """Return the plugin object; the factory named by our entry point."""
    return Bridge()


async def serve(llm: Any) -> Bridge:
    """Pause an AsyncLLM of your own process and serve its bridge, as `vllm serve` does.

    A weightsync-server beside it then proves its weights and lets it generate. Await `stop` of what
    this returns before the AsyncLLM is shut down.

    Args:
        llm: vLLM's AsyncLLM, on whose loop this is called.

    Raises:
        WeightSyncError: The socket is another engine's, or cannot be made.
    """
    bridge = Bridge()
    await bridge.init_state(llm, None, None)
    return bridge
