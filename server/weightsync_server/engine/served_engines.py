"""Makes the engines that the settings name, and what each of them needs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from weightsync.engine import Engine, UpdateFeed
from weightsync_server.engine.applier import Applier
from weightsync_server.engine.drivers.bridge import BridgeEngine
from weightsync_server.engine.engine_participant import EngineApplier
from weightsync_server.engine.engine_parts import EngineContext
from weightsync_server.engine.engine_set import EngineSet, check_engines, engine_name
from weightsync_server.engine.journal import Journal, JournalFile
from weightsync_server.engine.supervisor import EngineSupervisor
from weightsync_server.ops.settings_group import setting


class EngineWatcher(Protocol):
    """What watches one engine, from `start` to `stop`."""

    def start(self) -> None:
        """Begin to watch, if there is anything to watch for."""

    async def stop(self) -> None:
        """Watch no longer."""


#: Returns what watches an engine; without a feed, the engine receives nothing by itself.
MakeWatcher = Callable[[EngineSupervisor, UpdateFeed | None, Applier], EngineWatcher]


@dataclass(frozen=True)
class ServedEngines:
    """Which engines there are."""

    given: list[str] = setting(
        [],
        "unix:PATH of the bridge in vLLM; repeat for several engines. 'embedded': host vLLM in "
        "this process; 'memory': an engine without vLLM that generates nothing, for tests of "
        "trainers; 'none'. Default: engine.sock in run_dir; no default if engines names a folder.",
        name="engine",
        check=check_engines,
    )
    folder: Path | None = setting(
        None,
        "Folder of engines that start and stop: each NAME.sock in it is a bridge's socket.",
        name="engines",
    )
    model: str = setting(
        "",
        "Embedded engine: model folder or name for vLLM. Engine 'memory': a safetensors file, or "
        "a folder of them.",
    )
    ranks: int = setting(1, "Engine 'memory': number of ranks, each with the model.", ge=1, le=64)

    def check(self) -> None:
        """Refuse with ValueError what does not go together."""
        if bool(self.model) != bool({"embedded", "memory"} & set(self.given)):
            raise ValueError(
                "model names what --engine embedded or memory loads: give both or neither"
            )
        if self.folder and self.given and self.given != ["none"]:
            raise ValueError("give engines, a folder of engines, or engine, not both")
        if self.ranks > 1 and self.given != ["memory"]:
            raise ValueError(
                "leave ranks out: it is only for --engine memory; vLLM has its own flags"
            )

    def names(self, run_dir: Path) -> list[str]:
        """Return those that are there from the start; the default one's socket is in `run_dir`."""
        return self.given or (
            [] if self.folder else [f"unix:{(run_dir / 'engine.sock').absolute()}"]
        )


class Engines:
    """The engines of a server, and what watches them.

    The `journal` is that of all of them. `own_sockets` are of the server, and may lie in the folder
    of engines that come and go. `on_change` is called with whether an engine serves one
    verified version. Each of `watchers` watches each engine, from `start_watchers` on.
    """

    def __init__(
        self,
        options: ServedEngines,
        context: EngineContext,
        journal: JournalFile,
        own_sockets: Sequence[Path],
        on_change: Callable[[bool], None],
        watchers: Sequence[MakeWatcher] = (),
    ) -> None:
        self._options = options
        self._context = context
        self._journal = journal
        self._on_change = on_change
        self._makers = watchers
        self._run_dir: Path | None = None
        self._applier: Applier | None = None
        self._watchers: dict[str, list[EngineWatcher]] = {}
        self.set = EngineSet(
            journal,
            options.folder,
            self._found,
            self._left,
            frozenset(path.resolve() for path in own_sockets),
        )

    async def open(
        self, segment_socket: Path, engine_args: Sequence[str], stack: contextlib.AsyncExitStack
    ) -> None:
        """Make the engines that are named, not started; the stack closes them.

        `segment_socket` and `engine_args`, flags of vLLM, are for engines of this process. The
        `stack` is the server's.
        """
        self._run_dir = segment_socket.parent
        for name in self._options.names(self._run_dir):
            if name != "none":
                engine = await _opened(name, self._options, segment_socket, engine_args)
                stack.push_async_callback(engine.close)
                self.set.add(self._made(engine_name(name), engine))

    def start_watchers(self, applier: Applier) -> None:
        """Have engines watched from now on, those that come later too."""
        self._applier = applier
        for supervisor in self.set.supervisors:
            self._watch(supervisor, applier)

    async def stop_watchers(self) -> None:
        """Have them watched no longer."""
        self._applier = None
        found = [watcher for each in self._watchers.values() for watcher in each]
        await asyncio.gather(*(watcher.stop() for watcher in found))

    def _watch(self, supervisor: EngineSupervisor, applier: Applier) -> None:
        updates = supervisor.engine.updates
        watchers = [make(supervisor, updates, applier) for make in self._makers]
        self._watchers[supervisor.name] = watchers
        for watcher in watchers:
            watcher.start()

    def _found(self, socket: Path) -> EngineApplier:
        engine = BridgeEngine(f"unix:{socket.absolute()}", self._run_dir)
        made = self._made(engine_name(socket), engine)
        if self._applier is not None:
            self._watch(made.supervisor, self._applier)
        return made

    async def _left(self, gone: EngineSupervisor) -> None:
        for watcher in self._watchers.pop(gone.name, ()):
            await watcher.stop()
        self._context.nodes.release(gone.engine)

    def _made(self, name: str, engine: Engine) -> EngineApplier:
        supervisor = EngineSupervisor(
            engine,
            self._context,
            Journal(self._journal, name),
            lambda: self._on_change(self.set.serving),
        )
        return EngineApplier(supervisor)


async def _opened(
    name: str, options: ServedEngines, segment_socket: Path, engine_args: Sequence[str]
) -> Engine:
    if name == "embedded":
        # Imports vLLM and torch, which a server beside a bridge has no need of.
        from weightsync_server.engine.drivers.hosted import start_embedded

        return await start_embedded(options.model, segment_socket, engine_args)
    if name == "memory":
        from weightsync_server.engine.drivers.hosted import load_memory_engine

        return load_memory_engine(options.model, segment_socket, options.ranks)
    return BridgeEngine(name, segment_socket.parent)
