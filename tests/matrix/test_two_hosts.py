"""Ranks on the server's host and on another one, which network namespaces are, push together."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.matrix.far_rank import SEED, push_steps
from tests.matrix.test_box_deltas import WRITERS, changed, everything, matrix
from tests.support.network_hosts import NEAR, NetworkHosts, network_hosts
from tests.support.secured import Secured
from tests.support.server_fixtures import RETRY
from weightsync_client import Client


@pytest.fixture(name="hosts", scope="module")
def _hosts() -> Iterator[NetworkHosts]:
    with network_hosts() as hosts:
        yield hosts


@pytest.fixture(name="server", scope="module")
def _server(hosts: NetworkHosts) -> Iterator[Secured]:
    """A server on the near host, whose unix sockets only that one has."""
    folder = Path(tempfile.mkdtemp(prefix="wsh"))
    secured = Secured(folder, tls=True, flags=("--same-host", "--slots", "3"))
    secured.server.wrapper = hosts.on_near()
    secured.start()
    yield secured
    secured.stop()
    shutil.rmtree(folder, ignore_errors=True)


def far_rank(secured: Secured, hosts: NetworkHosts, writer: int) -> Any:
    """Push as a rank on another host; its server's name is known there."""
    names = secured.folder / "hosts"
    names.write_text(f"{NEAR} server.test\n")
    rank = [sys.executable, "-m", "tests.matrix.far_rank"]
    told = [f"server.test:{secured.port}", str(secured.ca.ca), secured.tokens["push"], str(writer)]
    done = subprocess.run(
        hosts.on_far(names, [*rank, *told]),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        timeout=120,
    )
    return json.loads(done.stdout)


def test_two_write_into_its_memory_and_two_stream(server: Secured, hosts: NetworkHosts) -> None:
    def near_rank(writer: int) -> Any:
        with Client(server.socket("push"), retry=RETRY) as client:
            return push_steps(client, writer)

    with ThreadPoolExecutor(WRITERS) as pool:
        near = [pool.submit(near_rank, writer) for writer in range(2)]
        far = [pool.submit(far_rank, server, hosts, writer) for writer in (2, 3)]
        ranks = [rank.result() for rank in near + far]
    for step, (kind, weights) in enumerate(
        [("full", matrix(SEED)), ("delta", changed(matrix(SEED), SEED + 1))]
    ):
        told = [rank[step] for rank in ranks]
        assert {one["kind"] for one in told} == {kind}
        # What changed is always sent.
        ways = ["same_host"] * 2 if kind == "full" else ["stream"] * 2
        assert [one["way"] for one in told] == [*ways, "stream", "stream"]
        with Client(server.socket("push"), retry=RETRY) as client:
            alone = client.push(everything(weights), delta="never")
        assert {one["digest"] for one in told} == {alone.content_digest}
