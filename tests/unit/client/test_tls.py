"""Client and server that do not agree on TLS: one sentence that says so, and what to set."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest

from tests.support.certificates import Authority, Pair
from tests.unit.client.servicer import Servicer, start
from weightsync.errors import Reason
from weightsync_client import (
    Access,
    AsyncClient,
    Client,
    ClientError,
    InvalidError,
    PushOptions,
    Retry,
    UnavailableError,
)
from weightsync_client.rpc import retry
from weightsync_client.rpc.retry import RetryState


@dataclass
class Servers:
    """One service behind three ports: plain text, TLS, and TLS that wants a certificate."""

    servicer: Servicer
    ca: Authority
    plain: int
    tls: int
    mutual: int
    elsewhere: int


def _pem(pair: Pair) -> tuple[bytes, bytes]:
    return pair.key.read_bytes(), pair.certificate.read_bytes()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    ca = Authority(tmp_path / "ca")
    ports: list[int] = []

    def add(server: grpc.Server) -> None:
        ours, other = _pem(ca.sign("s", "localhost")), _pem(ca.sign("o", "elsewhere.test"))
        roots = ca.ca.read_bytes()
        kinds = (
            grpc.ssl_server_credentials([ours]),
            grpc.ssl_server_credentials([ours], roots, require_client_auth=True),
            grpc.ssl_server_credentials([other]),
        )
        ports.extend(server.add_secure_port("localhost:0", kind) for kind in kinds)

    running = start(Servicer(), address="localhost:0", add=add)
    plain = int(running.address.rpartition(":")[2])
    yield Servers(running.servicer, ca, plain, *ports)
    running.stop()


def _error(port: int, access: Access) -> ClientError:
    with (
        Client(f"localhost:{port}", access=access, retry=Retry(attempts=1)) as client,
        pytest.raises(ClientError) as caught,
    ):
        client.status()
    return caught.value


def test_a_link_that_is_closed_at_once_may_lack_tls(servers: Servers) -> None:
    trusting = Access(tls_ca=servers.ca.ca)
    for port, access in (
        (servers.tls, Access()),
        (servers.mutual, Access()),
        (servers.mutual, trusting),
    ):
        error = _error(port, access)
        assert isinstance(error, UnavailableError)
        assert "if it speaks TLS, set WEIGHTSYNC_TLS_CA (tls_ca), and WEIGHTSYNC_TLS_CERT" in (
            error.message
        )


def test_tls_that_does_not_fit_is_permanent(servers: Servers, tmp_path: Path) -> None:
    other = Access(tls_ca=Authority(tmp_path / "other").ca)
    trusting = Access(tls_ca=servers.ca.ca)
    for port, access, cause in (
        (servers.tls, other, "CERTIFICATE_VERIFY_FAILED"),
        (servers.plain, trusting, "WRONG_VERSION_NUMBER"),
        (servers.elsewhere, trusting, "Hostname Verification Check failed"),
    ):
        error = _error(port, access)
        assert isinstance(error, InvalidError)
        assert error.reason is Reason.REQUEST_INVALID
        assert cause in error.message
        assert ": OK" not in error.message
        assert error.message.endswith("and that its certificate names this host")


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the seconds that are waited for before another try."""
    waited: list[float] = []

    def delay_s(backoff: RetryState, error: ClientError) -> float | None:
        delay = call_delay_s(backoff, error)
        if delay is not None:
            waited.append(delay)
        return delay

    call_delay_s = retry._call_delay_s
    monkeypatch.setattr(retry, "_call_delay_s", delay_s)
    return waited


def test_tls_that_does_not_fit_is_tried_once(
    servers: Servers, tmp_path: Path, tries: list[float]
) -> None:
    access = Access(tls_ca=Authority(tmp_path / "other").ca)
    assert isinstance(_error(servers.tls, access), InvalidError)
    assert not tries
    # A link that is broken is.
    assert isinstance(_error(servers.tls, Access()), UnavailableError)
    assert tries


async def test_asyncio_tries_it_once_too(
    servers: Servers, tmp_path: Path, tries: list[float]
) -> None:
    access = Access(tls_ca=Authority(tmp_path / "other").ca)
    async with AsyncClient(f"localhost:{servers.tls}", access=access) as client:
        with pytest.raises(InvalidError):
            await client.status()
    assert not tries


def test_a_data_port_with_other_tls_is_left(servers: Servers) -> None:
    servers.servicer.data_endpoints = [f":{servers.elsewhere}", f":{servers.plain}"]
    options = PushOptions(streams=2)
    access = Access(tls_ca=servers.ca.ca)
    retry = Retry(attempts=5, initial_s=0.01, max_s=0.05)
    with Client(f"localhost:{servers.tls}", access=access, retry=retry) as client:
        assert client.push({"a": np.arange(8.0), "b": np.ones(8)}, **options).version == 1


def _status(port: int, ca: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "GRPC_VERBOSITY"}
    return subprocess.run(
        [Path(sys.executable).with_name("weightsync"), "status"],
        env=environment
        | {"WEIGHTSYNC_ADDRESS": f"localhost:{port}", "WEIGHTSYNC_TLS_CA": str(ca)}
        | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_prints_its_sentence_alone(servers: Servers, tmp_path: Path) -> None:
    ca = Authority(tmp_path / "other").ca
    done = _status(servers.tls, ca)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"weightsync: localhost:{servers.tls} and this client do not")
    assert done.stderr.count("\n") == 1
    assert "Handshake failed" in _status(servers.tls, ca, GRPC_VERBOSITY="INFO").stderr
