"""The embedded engine: vLLM and its OpenAI API hosted in this process, on its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import socket
from collections.abc import Sequence
from typing import Any

from weightsync.backoff import until
from weightsync.errors import Reason, WeightSyncError, invalid_request
from weightsync.vllm.bridge.adapter import VllmEngine
from weightsync.vllm.bridge.extension_points import AsgiApp, MakeUpdates, Middleware
from weightsync.vllm.bridge.readiness_gate import ReadinessGate
from weightsync.vllm.env import EngineSettings

_CLI_ARGS = (
    "vllm.entrypoints.common.cli_args",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.openai.cli_args",
)
#: Where vLLM keeps what builds its API server, newest release first.
_HOMES = {
    "make_arg_parser": _CLI_ARGS,
    "validate_parsed_serve_args": _CLI_ARGS,
    "build_async_engine_client": (
        "vllm.entrypoints.launchers.api_server.entry",
        "vllm.entrypoints.openai.api_server",
    ),
    "build_app": ("vllm.entrypoints.launchers.app", "vllm.entrypoints.openai.api_server"),
    "init_app_state": (
        "vllm.entrypoints.launchers.api_server.app_state",
        "vllm.entrypoints.openai.api_server",
    ),
}


def _vllm(name: str) -> Any:
    for home in _HOMES[name]:
        try:
            return getattr(importlib.import_module(home), name)
        except (ModuleNotFoundError, AttributeError):
            continue
    raise WeightSyncError(
        Reason.ENGINE_UNSUPPORTED, f"this vLLM has no {name}; use a release from 0.26 to 0.33"
    )


def _parse(flags: Sequence[str]) -> Any:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = _vllm("make_arg_parser")(FlexibleArgumentParser(prog="vLLM"))
    args = parser.parse_args(list(flags))
    if args.model_tag:
        args.model = args.model_tag
    _vllm("validate_parsed_serve_args")(args)
    if (args.api_server_count or 1) > 1:
        raise WeightSyncError(
            Reason.ENGINE_UNSUPPORTED,
            "several API server processes are not supported; pass --api-server-count 1",
        )
    return args


def _check_plugins() -> None:
    from vllm import envs

    if envs.VLLM_PLUGINS is not None and "weightsync" not in envs.VLLM_PLUGINS:
        raise WeightSyncError(
            Reason.ENGINE_UNSUPPORTED,
            "add weightsync to VLLM_PLUGINS: without it, vLLM does not load weightsync's "
            "worker methods",
        )


class EmbeddedEngine(VllmEngine):
    """An engine that lives and dies with this process; otherwise the same as the bridge's.

    Make it with `launch`. HTTP answers 503 until the first `resume`. `address` is the URL of vLLM's
    OpenAI API.
    """

    address: str = ""
    _http: Any = None
    _serving: asyncio.Task[None] | None = None
    _exits: contextlib.AsyncExitStack

    @classmethod
    async def launch(
        cls,
        flags: Sequence[str],
        segment_socket: str = "",
        makers: Sequence[MakeUpdates] = (),
        middlewares: Sequence[Middleware] = (),
    ) -> EmbeddedEngine:
        """Start vLLM, paused, and its HTTP API. Takes as long as vLLM takes to load the model.

        `flags` are vLLM's own command line, such as `["--model", DIR, "--port", "8000"]`. The
        workers find the server's segments at `segment_socket`; "" takes it from the environment.
        `makers` may set its updates. `middlewares` come behind the gate, the first one last.

        Raises:
            WeightSyncError: ENGINE_UNSUPPORTED for a vLLM or flags that cannot be hosted.
            SystemExit: vLLM's parser refused the flags.
        """
        if segment_socket:
            # Workers are processes of their own and inherit this.
            os.environ["WEIGHTSYNC_SEGMENT_SOCKET"] = f"unix:{segment_socket}"
        _check_plugins()
        args = _parse(flags)
        async with contextlib.AsyncExitStack() as stack:
            listener = None if args.uds else _listen(args.host or "127.0.0.1", args.port)
            if listener is not None:
                stack.callback(listener.close)
            llm = await stack.enter_async_context(_vllm("build_async_engine_client")(args))
            # Our endpoint plugin, should it be loaded too, leaves this engine alone.
            llm.weightsync_hosted = True
            from vllm import __version__ as vllm_version

            engine = cls(llm, vllm_version, "embedded", makers)
            await engine.start()
            await engine._serve_http(llm, args, listener, middlewares)
            engine._exits = stack.pop_all()
        return engine

    async def close(self) -> None:
        """Stop HTTP, then vLLM and its processes. Repeating it is harmless."""
        await super().close()
        if self._serving is not None:
            self._http.should_exit = True
            with contextlib.suppress(asyncio.CancelledError):
                await self._serving
            self._serving = None
            await self._exits.aclose()

    async def _serve_http(
        self,
        llm: Any,
        args: Any,
        listener: socket.socket | None,
        middlewares: Sequence[Middleware],
    ) -> None:
        app = await _build_app(llm, args)
        behind: AsgiApp = app
        for middleware in middlewares:
            middleware.start(llm, self.live, EngineSettings.load())
            behind = middleware.wrap(behind)
        self._http = _http_server(ReadinessGate(behind, self.condition), args)
        # vLLM's handlers of a dead engine look for it there.
        app.state.server = self._http
        sockets = None if listener is None else [listener]
        self._serving = serving = asyncio.create_task(self._http.serve(sockets=sockets))
        await until(lambda: self._http.started or serving.done(), 0.01)
        if not self._http.started:
            await serving
            raise WeightSyncError(
                Reason.ENGINE_UNSUPPORTED, "vLLM's HTTP API did not start; check the log"
            )
        self.address = _url(args, listener)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Bound before the model is loaded, so that a taken port is told at once.
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise invalid_request(f"vLLM's HTTP API cannot listen on {host}:{port}: {error}") from error
    return listener


def _url(args: Any, listener: socket.socket | None) -> str:
    if listener is None:
        return f"unix:{args.uds}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _build_app(llm: Any, args: Any) -> Any:
    tasks = await llm.get_supported_tasks()
    app = _vllm("build_app")(args, tasks, llm.model_config)
    await _vllm("init_app_state")(llm, app.state, args, tasks)
    return app


def _http_server(app: Any, args: Any) -> Any:
    import uvicorn

    class Server(uvicorn.Server):
        """Leaves signals to the process that hosts it."""

        @contextlib.contextmanager
        def capture_signals(self) -> Any:
            yield

    config = uvicorn.Config(
        app,
        uds=args.uds,
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        timeout_graceful_shutdown=5,
    )
    return Server(config)
