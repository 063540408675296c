"""A server that is asked to end: calls finish, watches end, and it exits, whatever hangs."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest

from tests.support.bounds import one_shard, push_messages, within
from tests.support.leftovers import Mark
from tests.support.weightsync_server import WeightSyncServer
from weightsync import failpoints
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import Client, ClientError, Timeouts

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ws-") as name:
        yield Path(name)


def test_a_watch_does_not_keep_the_server_from_ending(folder: Path) -> None:
    server = WeightSyncServer(folder / "run", folder / "state", store="memory://")
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
        # A call that is waited for has 30 s.
        assert time.monotonic() - start < 15
    finally:
        server.stop()


def test_a_second_server_on_the_same_state_is_refused(folder: Path) -> None:
    server = WeightSyncServer(folder / "run", folder / "state", store="memory://").start()
    try:
        other = WeightSyncServer(folder / "other", folder / "state", store="memory://")
        with pytest.raises(RuntimeError, match="another weightsync-server uses"):
            other.start()
        with pytest.raises(grpc.RpcError):
            server.stub.GetVersion(pb.GetVersionRequest(model="nobody"), timeout=5)
    finally:
        assert server.stop() == 0


def test_what_does_not_stop_is_ended_and_nothing_is_lost(folder: Path) -> None:
    """A commit that hangs, as on a disk that does not answer, is waited for: but not for ever."""
    mark, plan = Mark(), folder / "plan"
    plan.write_text("commit.store=1>sleep(600)")
    server = WeightSyncServer(
        folder / "run",
        folder / "state",
        flags=["--drain-timeout-s=0", "--stop-timeout-s=2"],
        variables=mark.variables | {failpoints.VARIABLE: f"@{plan}"},
        ingest=1,
    ).start()
    assert server.process is not None
    try:
        server.stub.PushWeights(push_messages(one_shard(seed=1)), timeout=20)
        kept = _digests(server)
        with ThreadPoolExecutor(1) as pool:
            hanging = pool.submit(
                server.stub.PushWeights, push_messages(one_shard(seed=2)), timeout=60
            )
            within(20, Path(f"{plan}.hits").exists)
            server.process.send_signal(signal.SIGTERM)
            # Also its processes, which would hold the memory of the versions.
            assert server.process.wait(30) == 4
            assert mark.left_after(20) == []
            with pytest.raises(grpc.RpcError):
                hanging.result(20)
        assert "did not stop within 2 s" in server.log
        assert "PushService.close" in server.log
        plan.write_text("")
        server.start()
        # What had come whole may be committed now.
        assert kept.items() <= _digests(server).items()
        again = server.stub.PushWeights(push_messages(one_shard(seed=3)), timeout=20)
        assert again.version == max(_digests(server)) > max(kept)
        status = server.stub.GetStatus(pb.GetStatusRequest(), timeout=5)
        assert sum(status.invariant_violations.values()) == 0
    finally:
        assert server.stop() == 0


def test_a_log_that_nobody_reads_keeps_no_server_from_ending(folder: Path) -> None:
    """What it prints goes into a pipe that is full, so that its event loop stands still."""
    server = WeightSyncServer(
        folder / "run",
        folder / "state",
        store="memory://",
        flags=["--drain-timeout-s=1", "--stop-timeout-s=2"],
    )
    server.run_dir.mkdir()
    log = server.run_dir / "server.log"
    os.mkfifo(log)
    pipe = os.open(log, os.O_RDWR)
    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096)
    try:
        with Client(server.start().address, timeouts=Timeouts(call_s=2)) as client:
            with pytest.raises(ClientError):  # noqa: PT012 - one of them
                for _ in range(100):
                    client.acquire_epoch()  # and a line for each
            assert server.process is not None
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(20) == 4
    finally:
        server.kill()
        os.close(pipe)


def _digests(server: WeightSyncServer) -> dict[int, str]:
    listed = server.stub.ListVersions(pb.ListVersionsRequest(model="default"), timeout=5)
    return {one.version: one.content_digest for one in listed.versions}


def test_one_that_starts_is_stopped_as_well(folder: Path) -> None:
    """It waits for an origin that takes its connection and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = WeightSyncServer(
            folder / "run",
            folder / "state",
            flags=["--follow", f"grpc://127.0.0.1:{silent.getsockname()[1]}", "--engine=none"],
        )
        with ThreadPoolExecutor(1) as pool:
            starting = pool.submit(server.start)
            link, _ = silent.accept()
            with link:
                assert server.process is not None
                server.process.send_signal(signal.SIGTERM)
                with pytest.raises(RuntimeError, match="asked to stop while it was starting"):
                    starting.result(20)
    assert server.process.returncode == 0
