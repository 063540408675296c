"""A server's parts start in one order, and stop in the reverse of it."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsync_server import app as app_module
from weightsync_server.app import App
from weightsync_server.flags import Flags

if TYPE_CHECKING:
    from types import FrameType

    import pytest

_START = [
    "Listeners.__init__",
    "StateLock.__init__",
    "FetcherPool.__init__",
    "SegmentServer.__init__",
    "open_store",
    "JournalFile.__init__",
    "LocalStore.open",
    "open_model",
    "PushService.restore",
    "Scrubber.__init__",
    "serve_same_host",
    "DiskWatch.start",
    "BridgeEngine.__init__",
    "Attachments.start",
    "open_register",
    "InvariantMonitor.start",
    "Listeners.bind",
    "MetricsEndpoint.__init__",
    "HttpApi.__init__",
    "IngestPool.serve",
    "Follower.start",
    "LocalHost.begin",
    "EngineSet.start",
    "UpdateCommitter.start",
    "Listeners.start",
    "FleetService.start",
    "TrainService.start",
]
_STOP = [
    "NodeGroup.close",
    "ChangeFeed.close",
    "TrainService.stop",
    "Listeners.close",
    "FleetService.leave",
    "UpdateCommitter.stop",
    "Applier.drain",
    "EngineSet.stop",
    "Follower.stop",
    "IngestPool.close",
    "InvariantMonitor.stop",
    "FolderKeys.close",
    "Attachments._close",
    "BridgeEngine.close",
    "DiskWatch.stop",
    "GpuFetchPool.close",
    "PushService.close",
    "Model.close",
    "JournalFile.close",
    "SegmentServer.close",
    "StateLock.close",
]


async def test_parts_start_in_one_order_and_stop_in_the_reverse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # It would change the collector and the limits of the process that runs the tests.
    monkeypatch.setattr(app_module, "tune_process", lambda: None)
    found: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_qualname
        if event == "call" and name in names and name not in found:
            found.append(name)

    with tempfile.TemporaryDirectory(prefix="wsa") as name:
        values: dict[str, Any] = {
            "engine": f"unix:{name}/absent.sock",
            "listen": [f"unix:{name}/server.sock"],
            "run_dir": Path(name),
            "state_dir": Path(name) / "state",
            "metrics": "127.0.0.1:0",
            "http": "127.0.0.1:0",
            "fetchers": 1,
            "ingest": 1,
            "follow": f"file://{name}/origin",
            "fleet": "f",
            "fleet_register": f"file://{name}/register",
        }
        app = App(Flags(**values).tree)
        before = sys.getprofile()
        try:
            names = set(_START)
            sys.setprofile(note)
            await app.start()
            started, found = found, []
            names = set(_STOP)
            await app.stop(0)
        finally:
            sys.setprofile(before)
    assert started == _START
    assert found == _STOP
