"""The engines of one host: those that are named, and those whose sockets come and go."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from weightsync.errors import Reason, WeightSyncError
from weightsync.log_lines import event
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.engine.engine_participant import EngineApplier
from weightsync_server.engine.journal import HostJournal, JournalFile
from weightsync_server.engine.supervisor import EngineSupervisor
from weightsync_server.ops.os_errors import translate_os_errors
from weightsync_server.ops.tasks import cancel_tasks

logger = logging.getLogger(__name__)


#: What an engine may be called.
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
#: Of sockets of bridges.
SUFFIX = ".sock"
_ALONE = ("embedded", "memory", "none")


def engine_name(engine: str | Path) -> str:
    """The file name of its socket, or what it is."""
    return Path(str(engine).removeprefix("unix:")).name.removesuffix(SUFFIX)


def check_engines(engines: list[str]) -> list[str]:
    """Return engines; refuse with ValueError those that cannot be told apart, or are none."""
    for engine in engines:
        if engine not in _ALONE and not engine.startswith("unix:"):
            raise ValueError(
                f"engine must be unix:PATH, 'embedded', 'memory' or 'none', not {engine!r}"
            )
        if engine not in _ALONE and not NAME.fullmatch(engine_name(engine)):
            raise ValueError(
                f"engine must name a socket of letters, digits and . _ -, such as "
                f"unix:/run/engine.sock, not {engine!r}"
            )
        if engine in _ALONE and len(engines) > 1:
            raise ValueError(
                f"name engine {engine} alone, or only sockets: it cannot be combined with others"
            )
    names = Counter(map(engine_name, engines))
    twice = next((name for name, count in names.items() if count > 1), "")
    if twice:
        raise ValueError(
            f"two engines would be called {twice}; give their sockets different file names"
        )
    return engines


#: How often the folder is looked at, seconds.
_LOOK_S = 0.5
#: Engines that have left of which it is remembered what they had loaded; the newest.
_GONE = 64


class EngineSet:
    """Knows every engine, in the order of their names.

    `folder` holds the sockets of engines that come and go, None when none do; sockets in `own` are
    this server's and may lie there too. `make` returns an applier that is not started yet.
    `on_left` is awaited with an engine that is gone.
    """

    def __init__(
        self,
        journal: JournalFile,
        folder: Path | None = None,
        make: Callable[[Path], EngineApplier] | None = None,
        on_left: Callable[[EngineSupervisor], Awaitable[None]] | None = None,
        own: frozenset[Path] = frozenset(),
    ) -> None:
        self.journal = journal
        self.host_journal = HostJournal(journal)
        self._folder = folder
        self._make = make
        self._on_left = on_left
        self._own = own
        self._appliers: dict[str, EngineApplier] = {}
        self._found: set[str] = set()
        self._passed_over: set[str] = set()
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None
        #: What engines that are not there have loaded, by name: they may come back.
        self._gone: dict[str, str] = {}

    def add(self, applier: EngineApplier) -> None:
        self._appliers[applier.name] = applier
        self._appliers = dict(sorted(self._appliers.items()))

    def start(self) -> None:
        for applier in self._appliers.values():
            applier.supervisor.start()
        if self._folder is not None:
            self._task = asyncio.create_task(self._watch(), name="engines")

    async def stop(self) -> None:
        """The engines go on with what they serve."""
        await cancel_tasks(self._task)
        while self._leaving:
            await asyncio.gather(*self._leaving.values(), return_exceptions=True)
        await asyncio.gather(*(one.supervisor.stop() for one in self._appliers.values()))
        for name in self._found:
            await self._appliers[name].supervisor.engine.close()

    @property
    def several(self) -> bool:
        """Whether there are several engines, or may be."""
        return self._folder is not None or len(self._appliers) > 1

    @property
    def supervisors(self) -> list[EngineSupervisor]:
        return [one.supervisor for one in self._appliers.values()]

    @property
    def serving(self) -> bool:
        """Whether an engine serves one verified version."""
        return any(supervisor.serving for supervisor in self.supervisors)

    @property
    def loaded(self) -> frozenset[str] | None:
        """Names and paths of what engines have loaded, and load again; None: one has not told."""
        there = {one.supervisor.name: one.supervisor.loaded for one in self._appliers.values()}
        known = self._gone | {name: loaded for name, loaded in there.items() if loaded}
        return frozenset(known.values()) if there.keys() <= known.keys() else None

    @property
    def appliers(self) -> list[EngineApplier]:
        return list(self._appliers.values())

    def named(self, name: str) -> list[EngineApplier]:
        """Return the engine with a name, or all if it is empty; never none."""
        if not self._appliers:
            where = f"there is no socket in {self._folder}" if self._folder else "--engine is none"
            raise WeightSyncError(
                Reason.ENGINE_AWAY,
                f"this server has no engine ({where}); start one, or ask a server that has one",
            )
        if not name:
            return list(self._appliers.values())
        if name not in self._appliers:
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                f"there is no engine {name[:64]!r}; this host has {', '.join(self._appliers)}",
            )
        return [self._appliers[name]]

    def status(self) -> list[pb.EngineStatus]:
        return [supervisor.status() for supervisor in self.supervisors]

    async def _watch(self) -> None:
        while True:
            try:
                await self._look()
            except WeightSyncError as error:
                logger.warning("cannot look for engines: %s", error.message)
            except Exception:
                logger.exception("the search for engines failed, and is started again")
            await asyncio.sleep(_LOOK_S)

    async def _look(self) -> None:
        if self._folder is None or self._make is None:
            return
        with translate_os_errors("looking for engines"):
            found = await asyncio.to_thread(_sockets, self._folder, self._own)
        sockets = {engine_name(path): path for path in found if NAME.fullmatch(engine_name(path))}
        self._warn({str(path) for path in found} - {str(path) for path in sockets.values()})
        for name in sorted(sockets.keys() - self._appliers.keys()):
            logger.info("engine %s appears", name, extra=event("engine.found", engine=name))
            applier = self._make(sockets[name])
            self.add(applier)
            self._found.add(name)
            applier.supervisor.start()
        for name in sorted(self._found - sockets.keys() - self._leaving.keys()):
            logger.info("engine %s was removed", name, extra=event("engine.gone", engine=name))
            # An apply that has it ends first; one that comes back under its name waits for that.
            self._leaving[name] = asyncio.create_task(self._leave(name), name=f"leave {name}")

    def _warn(self, passed_over: set[str]) -> None:
        """Name sockets that are no engine's, each once while it is there."""
        for path in sorted(passed_over - self._passed_over):
            logger.warning(
                "%r is not used as an engine; name it with 1 to 64 letters, digits and . _ - "
                "before %s, unlike the others",
                path,
                SUFFIX,
            )
        self._passed_over = passed_over

    async def _leave(self, name: str) -> None:
        gone = self._appliers[name].supervisor
        try:
            await gone.leave()
            if self._on_left is not None:
                await self._on_left(gone)
        finally:
            if loaded := gone.loaded:
                self._gone.pop(name, None)
                self._gone[name] = loaded
                self._gone = dict([*self._gone.items()][-_GONE:])
            del self._appliers[name], self._leaving[name]
            self._found.discard(name)


def _sockets(folder: Path, own: frozenset[Path]) -> list[Path]:
    found = {path.resolve() for path in folder.glob(f"*{SUFFIX}") if path.is_socket()}
    return sorted(found - own)
