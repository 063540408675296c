"""Makes the engines that the settings name, and what each of them needs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightsync_server.engine import (
    Applier,
    EngineApplier,
    EngineSet,
    EngineSupervisor,
    HostParts,
    Journal,
    JournalFile,
    ModelParts,
    UpdateCommitter,
)
from weightsync_server.engine.drivers.bridge import BridgeEngine
from weightsync_server.engine.engine_names import engine_name

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from weightsync.engine import Engine

__all__ = ["EngineOptions", "Engines"]


@dataclass(frozen=True)
class EngineOptions:
    """Which engines there are.

    Attributes:
        names: `unix:PATH` of each bridge; or `embedded`, `memory` or `none` alone.
        folder: In it lie the sockets of bridges that come and go; None: none do.
        own_sockets: Of the server, which may lie there too.
        model: What an embedded or memory engine loads.
        ranks: Of a memory engine.
        engine_args: Flags of vLLM for an embedded engine.
    """

    names: Sequence[str]
    folder: Path | None
    own_sockets: Sequence[Path]
    model: str
    ranks: int
    engine_args: tuple[str, ...]


class Engines:
    """The engines of a server, and what trainers send to them directly.

    Args:
        options: Which there are.
        parts: What they serve.
        host: What they share.
        journal: Of all of them.
        on_change: Called with whether an engine serves one verified version.

    Attributes:
        set: Knows them all.
    """

    def __init__(
        self,
        options: EngineOptions,
        parts: ModelParts,
        host: HostParts,
        journal: JournalFile,
        on_change: Callable[[bool], None],
    ) -> None:
        self._options = options
        self._parts = parts
        self._host = host
        self._journal = journal
        self._on_change = on_change
        self._engines: dict[str, tuple[EngineSupervisor, Engine]] = {}
        self._run_dir: Path | None = None
        self._applier: Applier | None = None
        self._updates: dict[str, UpdateCommitter] = {}
        self.set = EngineSet(
            journal,
            options.folder,
            self._found,
            self._left,
            frozenset(path.resolve() for path in options.own_sockets),
        )

    async def open(self, segment_socket: Path, stack: contextlib.AsyncExitStack) -> None:
        """Make the engines that are named, not started; the stack closes them.

        Args:
            segment_socket: Path of the segment socket, for engines of this process.
            stack: Of the server.
        """
        self._run_dir = segment_socket.parent
        for name in self._options.names:
            if name != "none":
                engine = await _opened(name, self._options, segment_socket)
                stack.push_async_callback(engine.close)
                self._add(engine_name(name), engine)

    def _add(self, name: str, engine: Engine) -> None:
        applier = self._made(name, engine)
        self.set.add(applier)

    def start_updates(self, applier: Applier) -> None:
        """Have what engines receive by themselves become versions, from now on."""
        self._applier = applier
        for name, (supervisor, engine) in self._engines.items():
            self._watch_updates(name, supervisor, engine, applier)

    async def stop_updates(self) -> None:
        """Watch for that no longer."""
        self._applier = None
        await asyncio.gather(*(updates.stop() for updates in self._updates.values()))

    def _watch_updates(
        self, name: str, supervisor: EngineSupervisor, engine: Engine, applier: Applier
    ) -> None:
        segments = self._host.segments
        updates = UpdateCommitter(supervisor, engine.updates, applier, self._parts, segments)
        self._updates[name] = updates
        updates.start()

    def _found(self, socket: Path) -> EngineApplier:
        name = engine_name(socket)
        engine = BridgeEngine(f"unix:{socket.absolute()}", self._run_dir)
        made = self._made(name, engine)
        if self._applier is not None:
            self._watch_updates(name, made.supervisor, engine, self._applier)
        return made

    async def _left(self, name: str) -> None:
        updates, (_, engine) = self._updates.pop(name, None), self._engines.pop(name)
        if updates is not None:
            await updates.stop()
        if self._parts.nodes is not None:
            self._parts.nodes.release(engine)

    def _made(self, name: str, engine: Engine) -> EngineApplier:
        supervisor = EngineSupervisor(
            engine,
            self._parts,
            self._host,
            Journal(self._journal, name),
            lambda: self._on_change(self.set.serving),
        )
        self._engines[name] = supervisor, engine
        return EngineApplier(supervisor, self._parts, self._host)


async def _opened(name: str, options: EngineOptions, segment_socket: Path) -> Engine:
    if name == "embedded":
        # Imports vLLM and torch, which a server beside a bridge has no need of.
        from weightsync_server.engine.drivers.embedded import start_embedded

        return await start_embedded(options.model, segment_socket, options.engine_args)
    if name == "memory":
        from weightsync_server.engine.drivers.memory_engine import load_memory_engine

        return load_memory_engine(options.model, segment_socket, options.ranks)
    return BridgeEngine(name, segment_socket.parent)
