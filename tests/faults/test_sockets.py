"""Servers that are given each other's sockets: the one that lives goes on."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.weightsync_server import WeightSyncServer
from weightsync.shm.segment_socket import SegmentClient
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="wsu"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def server(folder: Path) -> Iterator[WeightSyncServer]:
    server = WeightSyncServer(folder / "run", folder / "state", store="memory://").start()
    yield server
    assert server.stop() == 0, server.log


def _second(server: WeightSyncServer, folder: Path, **changes: Path | str) -> WeightSyncServer:
    """Return a server that has a state of its own."""
    listen = changes.pop("listen", f"unix:{folder}/second.sock")
    return replace(
        server,
        state_dir=folder / "second",
        flags=["--listen", str(listen)],
        process=None,
        _channels=[],
        **changes,  # type: ignore[arg-type]  # of the kinds that its fields have
    )


def _refused(
    server: WeightSyncServer, path: Path | str, remedy: str, never: str = "Traceback"
) -> str:
    ran = subprocess.run(
        server.command, check=False, capture_output=True, text=True, timeout=30, env=os.environ
    )
    assert ran.returncode == 1, ran.stderr
    last = ran.stderr.splitlines()[-1]
    assert last.startswith("weightsync-server: ")
    assert str(path) in last
    assert remedy in last
    assert "Traceback" not in ran.stderr
    assert never not in ran.stderr
    return last


def _serves(server: WeightSyncServer) -> None:
    server.stub.GetStatus(pb.GetStatusRequest(), timeout=5)
    with SegmentClient(server.segment_socket) as client:
        assert client.map([]) == []


def test_a_listen_path_of_another_server_is_refused(server: WeightSyncServer, folder: Path) -> None:
    other = _second(server, folder, run_dir=folder / "run2", listen=server.address)
    last = _refused(other, server.address.removeprefix("unix:"), "another path with --listen")
    assert "another process listens" in last
    _serves(server)


def test_a_segment_socket_of_another_server_is_refused(
    server: WeightSyncServer, folder: Path
) -> None:
    last = _refused(_second(server, folder), server.segment_socket, "choose another --run-dir")
    assert "another process listens" in last
    _serves(server)


def test_a_path_that_is_named_twice_is_refused(server: WeightSyncServer, folder: Path) -> None:
    run = folder / "run2"
    listen = f"unix:{run}/segments.sock"
    _refused(
        _second(server, folder, run_dir=run, listen=listen), f"{run}/segments.sock", "--listen"
    )


def test_a_path_is_the_one_that_grpc_takes(server: WeightSyncServer, folder: Path) -> None:
    # gRPC reads addresses as URIs.
    listen = server.address.replace("server", "%73erver").replace("unix:", "unix://")
    other = _second(server, folder, run_dir=folder / "run2", listen=listen)
    _refused(other, "server.sock", "another path with --listen")
    _serves(server)


def test_a_metrics_port_of_another_is_refused_before_it_tells_that_it_listens(
    server: WeightSyncServer, folder: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        other = _second(server, folder, run_dir=folder / "run2")
        other.flags = [*other.flags, "--metrics", address]
        last = _refused(other, address, "; choose another with --metrics", never="listening on")
    assert "is in use" in last


def test_what_is_no_socket_is_left_alone(server: WeightSyncServer, folder: Path) -> None:
    precious = folder / "precious"
    precious.write_text("data")
    other = _second(server, folder, run_dir=folder / "run2", listen=f"unix:{precious}")
    assert "is not a socket; remove it" in _refused(other, precious, "--listen")
    assert precious.read_text() == "data"


def test_sockets_of_a_server_that_was_killed_are_taken(server: WeightSyncServer) -> None:
    server.kill()
    with socket.socket(socket.AF_UNIX) as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(server.address.removeprefix("unix:"))
    server.start()
    _serves(server)


def test_a_server_that_stops_leaves_no_socket(server: WeightSyncServer) -> None:
    assert server.stop() == 0
    assert [path for path in server.run_dir.iterdir() if path.is_socket()] == []
    server.start()
    _serves(server)
