"""Servers that fall silent: whoever waits for one is told so, and a quiet stream is left alone."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.support.bounds import serving
from tests.support.network_hosts import NEAR, NetworkHosts, network_hosts
from tests.support.secured import Secured
from weightsync.errors import Reason
from weightsync.wire.grpc_channels import CLIENT_KEEPALIVE
from weightsync_client import Client, Retry, Timeouts, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

# Far longer than a silent peer is waited for, and far shorter than any time of a call below.
pytestmark = pytest.mark.timeout(75)

PATIENT = Timeouts(call_s=3600, watch_s=3600)
ONCE = Retry(attempts=1)
TENSORS = {"w": torch.zeros(8)}
#: A server hangs up on the third ping that comes too soon; this is one more.
PINGS = 4


def waiting(client: Client) -> UnavailableError:
    """Return how a call ends that a server does not answer."""
    with pytest.raises(UnavailableError) as caught:
        client.status()
    return caught.value


def watching(client: Client) -> UnavailableError:
    """Return how a watch ends of a server that has nothing more to say."""
    with pytest.raises(UnavailableError) as caught:
        list(client.watch())
    return caught.value


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_calls_of_a_frozen_server_end_in_one_sentence() -> None:
    tcp = free_address()
    with serving(tcp=tcp) as server, ThreadPoolExecutor(4) as pool:
        with Client(tcp) as trainer:
            trainer.push(TENSORS)
        clients = [
            Client(address, timeouts=PATIENT, retry=ONCE)
            for address in (tcp, server.address)
            for _ in range(2)
        ]
        for client in clients:
            client.status()
        watches = [pool.submit(watching, client) for client in clients[::2]]
        time.sleep(1)  # so that the watches have begun, which nothing tells of before an event
        assert server.process is not None
        server.process.send_signal(signal.SIGSTOP)
        try:
            calls = [pool.submit(waiting, client) for client in clients[1::2]]
            errors = [one.result() for one in (*calls, *watches)]
        finally:
            server.process.send_signal(signal.SIGCONT)
        for error in errors:
            assert error.reason is Reason.SERVER_AWAY
            assert "\n" not in str(error)
        for client in clients:
            # It was frozen, not dead.
            assert client.status().models
            client.close()


@pytest.mark.battery
def test_a_quiet_stream_over_a_healthy_link_goes_on() -> None:
    tcp = free_address()
    with serving(tcp=tcp) as server:
        watches = [Client(address, retry=ONCE).watch() for address in (tcp, server.address)]
        with Client(tcp) as trainer:
            first = trainer.push(TENSORS).version
            for watch in watches:
                while next(watch).version.version != first:
                    pass
            # As long as so many pings of a client take.
            time.sleep(PINGS * dict(CLIENT_KEEPALIVE)["grpc.keepalive_time_ms"] / 1000)
            second = trainer.push(TENSORS).version
        for watch in watches:
            # A new connection would begin with the state of all.
            changes = [next(watch)]
            while changes[-1].version.version != second:
                changes.append(next(watch))
            assert not any(change.initial for change in changes)


@pytest.fixture(name="hosts")
def _hosts() -> Iterator[NetworkHosts]:
    with network_hosts() as hosts:
        yield hosts


@pytest.fixture(name="server")
def _server(hosts: NetworkHosts) -> Iterator[Secured]:
    folder = Path(tempfile.mkdtemp(prefix="wss"))
    secured = Secured(folder, tls=True)
    secured.server.wrapper = hosts.on_near()
    yield secured.start()
    secured.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.battery
def test_a_watch_over_a_cut_link_ends_in_one_sentence(server: Secured, hosts: NetworkHosts) -> None:
    with Client(server.socket("push")) as trainer:
        pushed = trainer.push(TENSORS).version
    names = server.folder / "hosts"
    names.write_text(f"{NEAR} server.test\n")
    command = [sys.executable, "-m", "tests.support.watcher", f"server.test:{server.port}"]
    command += [str(server.ca.ca), server.tokens["follow"]]
    with subprocess.Popen(
        hosts.on_far(names, command), stdout=subprocess.PIPE, text=True
    ) as watcher:
        assert watcher.stdout is not None
        assert watcher.stdout.readline() == f"{pushed}\n"
        hosts.cut()
        told = json.loads(watcher.stdout.readline())
    assert told["reason"] == "SERVER_AWAY"
    assert "\n" not in told["message"]
    hosts.mend()
