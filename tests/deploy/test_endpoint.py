"""The metrics endpoint of a real server, with no engine in sight."""

from __future__ import annotations

import socket
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.deploy.conftest import LoneServer


def test_promtool_finds_no_fault_in_a_scrape(promtool: str, lone_server: LoneServer) -> None:
    ran = subprocess.run(
        [promtool, "check", "metrics"],
        input=lone_server.scrape(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_start_time_stands_still(lone_server: LoneServer) -> None:
    def started() -> float:
        lines = lone_server.scrape().splitlines()
        (line,) = [line for line in lines if line.startswith("weightsync_start_time_seconds{")]
        return float(line.split()[-1])

    first = started()
    assert 0 < time.time() - first < 120
    assert started() == first


@pytest.mark.parametrize(
    "request_part", [b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\nHost: x\r\n"]
)
def test_a_client_that_sends_half_a_request_is_dropped(
    lone_server: LoneServer, request_part: bytes
) -> None:
    begin = time.monotonic()
    with socket.create_connection(("127.0.0.1", lone_server.port), timeout=20) as client:
        client.sendall(request_part)
        answer = client.recv(1 << 16)
        while answer and (more := client.recv(1 << 16)):
            answer += more
    assert b" 200 " not in answer.partition(b"\r\n")[0]
    # The server's limit is 5 s.
    assert 4 < time.monotonic() - begin < 8


def test_scrapes_go_on_while_others_send_half_a_request(lone_server: LoneServer) -> None:
    idle = [socket.create_connection(("127.0.0.1", lone_server.port)) for _ in range(20)]
    try:
        begin = time.monotonic()
        assert "weightsync_build_info" in lone_server.scrape()
        assert time.monotonic() - begin < 3
    finally:
        for client in idle:
            client.close()
