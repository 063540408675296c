"""A server that is asked to end: calls finish, watches end, and it exits with 0."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import grpc
import numpy as np
import pytest

from tests.support.weightsync_server import WeightSyncServer
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import Client


def test_a_watch_does_not_keep_the_server_from_ending() -> None:
    with tempfile.TemporaryDirectory(prefix="ws-") as folder:
        server = WeightSyncServer(Path(folder, "run"), Path(folder, "state"), store="memory://")
        server.start()
        with Client(server.address) as client:
            client.push({"weight": np.zeros(4, np.float32)})
        watch = server.stub.WatchVersions(pb.WatchVersionsRequest(model="default"))
        try:
            next(watch)
            start = time.monotonic()
            assert server.process is not None
            server.process.terminate()
            assert list(watch) == []
            assert server.process.wait(20) == 0
            assert time.monotonic() - start < 15
        finally:
            server.stop()


def test_a_second_server_on_the_same_state_is_refused() -> None:
    with tempfile.TemporaryDirectory(prefix="ws-") as folder:
        state = Path(folder, "state")
        server = WeightSyncServer(Path(folder, "run"), state, store="memory://").start()
        try:
            other = WeightSyncServer(Path(folder, "other"), state, store="memory://")
            with pytest.raises(RuntimeError, match="another weightsync-server runs on"):
                other.start()
            with pytest.raises(grpc.RpcError):
                server.stub.GetVersion(pb.GetVersionRequest(model="nobody"), timeout=5)
        finally:
            assert server.stop() == 0
