"""A real server in a fleet dies or freezes: its engine stops in time, and serves when it is back.

The engine is the one for tests behind a real bridge, in this process, so that it outlives servers.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.bounds import one_shard
from tests.support.fleet_registers import FolderPlace
from tests.support.following import until
from tests.support.memory_bridge import memory_bridge
from tests.support.weightsync_server import WeightSyncServer
from weightsync.engine import EngineState
from weightsync.engine.leases import ServeLimit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightsync.testing import MemoryEngine

pytestmark = pytest.mark.timeout(120)

#: A server on a busy machine reads the register more often than that.
_MAX_AGE_S = 3.0
_SIZE = 1000


class Site:
    """A member of a fleet and its engine.

    Attributes:
        server: The member's server.
        broken: Where a folder lets nobody read the fleet's register.
        engine: It lives in this process.
    """

    def __init__(self, folder: Path, engine: MemoryEngine) -> None:
        self._folder, self.engine = folder, engine
        place = FolderPlace(folder)
        self.broken = folder / "register" / "f" / "records" / "applies+000000000001+plan"
        fleet = ("--fleet", "f", "--fleet-register", place.url, "--fleet-member", "a")
        self.server = self._server("state", *fleet, "--max-age-s", f"{_MAX_AGE_S:g}")

    def lone(self) -> WeightSyncServer:
        """Return a server for the same engine that is in no fleet, not started."""
        return self._server("lone")

    @property
    def state(self) -> EngineState:
        return self.engine._condition

    @property
    def pid(self) -> int:
        assert self.server.process is not None
        return self.server.process.pid

    def serve(self) -> None:
        """Start the member unless it runs; its engine serves on return."""
        if self.server.process is None or self.server.process.poll() is not None:
            self.server.start()
        self.server.wait_serving()
        assert self.state is EngineState.SERVING

    def until_fenced(self) -> None:
        """Return when the engine has stopped by itself."""
        until(lambda: self.state is EngineState.FENCED, "the engine stops", 20)
        assert self.engine._reason == ServeLimit.reason

    def _server(self, state: str, *flags: str) -> WeightSyncServer:
        flags = ("--fetchers", "1", "--memory-bytes", "64000000", *flags)
        return WeightSyncServer(self._folder / "run", self._folder / state, flags=flags)


@pytest.fixture(scope="module")
def one_site() -> Iterator[Site]:
    folder = Path(tempfile.mkdtemp(prefix="wt"))
    (folder / "run").mkdir()
    checkpoint = {"weight": ("U8", (_SIZE,), one_shard(_SIZE, 0).data[-_SIZE:])}
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        made = Site(folder, stack.enter_context(memory_bridge(folder / "run", checkpoint)))
        stack.callback(made.server.kill)
        yield made


@pytest.fixture
def site(one_site: Site) -> Site:
    one_site.serve()
    return one_site


def test_the_engine_of_a_server_that_is_killed_stops_and_comes_back(site: Site) -> None:
    # While its server is there it goes on.
    before = len(site.engine.events)
    time.sleep(1.5 * _MAX_AGE_S)
    assert site.state is EngineState.SERVING
    assert "overdue" not in site.engine.events[before:]
    site.server.kill()
    site.until_fenced()
    site.serve()


def test_the_engine_of_a_server_that_freezes_stops_and_comes_back(site: Site) -> None:
    os.kill(site.pid, signal.SIGSTOP)
    try:
        site.until_fenced()
    finally:
        os.kill(site.pid, signal.SIGCONT)
    until(lambda: site.state is EngineState.SERVING, "the engine serves again")
    site.server.wait_serving()


def test_a_restart_that_cannot_read_the_register_gives_no_time(site: Site) -> None:
    site.server.kill()
    # One that is gone would be made anew by a server that starts.
    site.broken.mkdir()
    try:
        site.server.start()
        # By itself, or by its server, which has found that out.
        until(lambda: site.state is EngineState.FENCED, "the engine stops")
        time.sleep(1)
        assert site.state is EngineState.FENCED
    finally:
        site.broken.rmdir()
    until(lambda: site.state is EngineState.SERVING, "the engine serves again")


def test_an_engine_whose_server_is_in_no_fleet_serves_on(site: Site) -> None:
    site.server.kill()
    lone = site.lone()
    try:
        lone.start()
        lone.wait_serving()
        until(lambda: not site.engine._limit.over, "the limit of the member is gone")
        lone.kill()
        before = len(site.engine.events)
        time.sleep(1.5 * _MAX_AGE_S)
        assert site.state is EngineState.SERVING
        assert site.engine.events[before:] == []
    finally:
        lone.kill()
