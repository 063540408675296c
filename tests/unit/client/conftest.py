"""Fixtures of the client's tests: a real server in this process, and clients of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.client.servicer import Running, Servicer, StatusError, start
from weightsync_client import Client, Retry, Timeouts
from weightsync_client.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def running() -> Iterator[Running]:
    server = start(Servicer())
    yield server
    server.stop()


@pytest.fixture
def servicer(running: Running) -> Servicer:
    return running.servicer


@pytest.fixture
def start_server() -> Callable[..., Running]:
    return start


@pytest.fixture
def status_error() -> type[StatusError]:
    return StatusError


@pytest.fixture
def retry() -> Retry:
    return Retry(attempts=4, initial_s=0.01, max_s=0.05)


@pytest.fixture
def client(running: Running, retry: Retry) -> Iterator[Client]:
    timeouts = Timeouts(call_s=10, begin_s=10, stream_s=30, commit_s=10, apply_s=10)
    with Client(running.address, timeouts=timeouts, retry=retry) as client:
        yield client


@pytest.fixture
def run(running: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("WEIGHTSYNC_ADDRESS", running.address)
    monkeypatch.delenv("WEIGHTSYNC_NAME", raising=False)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["weightsync", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        return int(ended.value.code or 0), told.out, told.err

    return run
