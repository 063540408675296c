"""Starts a server's stages in order and stops them in reverse."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from weightsync_server.auth.listeners import Listeners
from weightsync_server.extensions import engine_watchers, extra_services, http_verbs
from weightsync_server.http.extension_points import ExtensionHome, ExtraService
from weightsync_server.ops.process_tuning import tune_process
from weightsync_server.settings import Settings
from weightsync_server.stages import (
    listen,
    open_core,
    open_doors,
    open_engines,
    open_ground,
    open_versions,
    start_engines,
)


class App:
    """One server: `start`, then `stop`.

    `engine_args` are flags of vLLM, for the embedded engine.
    """

    def __init__(self, settings: Settings, engine_args: Sequence[str] = ()) -> None:
        self._settings = settings
        self._engine_args = tuple(engine_args)
        self._stack = contextlib.AsyncExitStack()
        self._drained_by = 0.0
        self._listeners: Listeners

    async def start(self) -> None:
        """Start every part; when one fails, those before it are stopped.

        Raises:
            WeightSyncError: With the remedy.
        """
        async with contextlib.AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()

    async def shut(self) -> str:
        """Wait until nobody can connect any more although nobody stopped it; return why."""
        return await self._listeners.shut()

    async def stop(self, drain_s: float | None = None) -> None:
        """Let calls finish, then stop everything.

        Calls get at most `drain_s`, by default the drain timeout.
        """
        longest_s = self._settings.drain_timeout_s
        seconds = longest_s if drain_s is None else min(drain_s, longest_s)
        self._drained_by = asyncio.get_running_loop().time() + seconds
        await self._stack.aclose()

    def _drain_s(self) -> float:
        """Return the seconds that are left of the drain; none where a start has failed."""
        return max(0.0, self._drained_by - asyncio.get_running_loop().time())

    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        settings = self._settings
        tune_process()
        ground = await open_ground(settings, stack)
        self._listeners = ground.listeners
        versions = await open_versions(ground, stack)
        watchers = engine_watchers()
        engines = await open_engines(ground, versions, stack, self._engine_args, watchers)
        core = open_core(ground, versions, engines, stack)
        paths, known = settings.paths, engines.served.set
        home = ExtensionHome(paths.run_dir, paths.state_dir, ground.identity)
        groups, model = settings.extensions, versions.model
        services = extra_services(groups, home, known, model, ground.metrics)
        doors = await open_doors(ground, core, stack, services, http_verbs)
        await start_engines(ground, core, stack, self._drain_s)
        await listen(ground, doors, stack, self._drain_s)
        if engines.fleet is not None:
            engines.fleet.start(doors.addresses[0])
        for service in services:
            await service.start()
            stack.push_async_callback(self._end_service, service)
        # Before the drain: a watch never ends by itself, nor does a node's call.
        stack.callback(model.feed.close)
        stack.callback(engines.nodes.close)

    async def _end_service(self, service: ExtraService) -> None:
        await service.stop(self._drain_s())
