"""Requests that no gRPC library would send, frame by frame: attack A4."""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, ResponseReceived, StreamReset, TrailersReceived

from tests.support.secured import Secured, code_of

OK, UNIMPLEMENTED, UNAUTHENTICATED = (
    str(code.value[0])
    for code in (
        grpc.StatusCode.OK,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNAUTHENTICATED,
    )
)
STATUS = "/weightsync.v1.WeightSync/GetStatus"
ACQUIRE = "/weightsync.v1.WeightSync/AcquireEpoch"
#: AcquireEpochRequest(model="default"), with the five bytes that gRPC puts before a message.
MESSAGE = b"\x00\x00\x00\x00\x09\x0a\x07default"
#: What a well-behaved client sends besides the path and the token.
USUAL = {
    ":method": "POST",
    ":scheme": "http",
    ":authority": "localhost",
    "te": "trailers",
    "content-type": "application/grpc",
}


@pytest.fixture(scope="module")
def secured() -> Iterator[Secured]:
    folder = Path(tempfile.mkdtemp(prefix="wsh"))
    secured = Secured(folder).start()
    yield secured
    assert secured.stop() == 0
    shutil.rmtree(folder)


def _ask(secured: Secured, headers: list[tuple[str, str]], body: bytes = MESSAGE) -> str:
    """Return the gRPC status of one request, the HTTP status where there is none, or "reset"."""
    # Nothing is checked and nothing is put right on the way out.
    config = H2Configuration(
        validate_outbound_headers=False, normalize_outbound_headers=False, header_encoding="utf-8"
    )
    connection = H2Connection(config)
    connection.initiate_connection()
    connection.send_headers(1, headers)
    connection.send_data(1, body, end_stream=True)
    seen: dict[str, str] = {}
    with socket.create_connection(("127.0.0.1", secured.port), timeout=10) as link:
        link.sendall(connection.data_to_send())
        while data := link.recv(65536):
            for event in connection.receive_data(data):
                if isinstance(event, StreamReset | ConnectionTerminated):
                    return seen.get("grpc-status", "reset")
                if isinstance(event, ResponseReceived | TrailersReceived):
                    seen |= {_text(key): _text(value) for key, value in event.headers}
            if "grpc-status" in seen:
                return seen["grpc-status"]
            link.sendall(connection.data_to_send())
    return seen.get("grpc-status") or f"http {seen[':status']}" if seen else "reset"


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode()


def _headers(path: str, token: str = "", **changes: Any) -> list[tuple[str, str]]:
    changed = {key.replace("_", "-"): value for key, value in changes.items()}
    fields: dict[str, Any] = USUAL | {":path": path} | changed
    if "method" in fields:
        fields[":method"] = fields.pop("method")
    headers = [(key, value) for key, value in fields.items() if value is not None]
    # Pseudo-headers come first.
    headers.sort(key=lambda header: not header[0].startswith(":"))
    return headers + ([("authorization", f"Bearer {token}")] if token else [])


def _changes(secured: Secured) -> float:
    return secured.metric("weightsync_state_calls_total")


PATHS = (
    ACQUIRE.removeprefix("/"),
    f"/{ACQUIRE}",
    f"{ACQUIRE}/",
    f"{ACQUIRE}?x=1",
    f"{ACQUIRE}#x",
    f"{ACQUIRE}%20",
    "/weightsync.v1.WeightSync%2FAcquireEpoch",
    "/weightsync.v1.WeightSync/./AcquireEpoch",
    "/weightsync.v1.WeightSync/../WeightSync/AcquireEpoch",
    "/weightsync.v1.WeightSync//AcquireEpoch",
    ACQUIRE.upper(),
    f"http://localhost{ACQUIRE}",
    "*",
    "",
)


@pytest.mark.parametrize("path", PATHS)
def test_only_the_exact_path_is_a_method(secured: Secured, path: str) -> None:
    before = _changes(secured)
    assert _ask(secured, _headers(path)) in (UNAUTHENTICATED, UNIMPLEMENTED, "reset")
    for name in ("read", "admin"):
        answer = _ask(secured, _headers(path, secured.tokens[name]))
        assert answer in (UNIMPLEMENTED, "reset"), (name, answer)
    assert _changes(secured) == before


def test_the_exact_path_is_served(secured: Secured) -> None:
    before = _changes(secured)
    assert _ask(secured, _headers(ACQUIRE)) == UNAUTHENTICATED
    assert _ask(secured, _headers(ACQUIRE, secured.tokens["push"])) == OK
    assert _changes(secured) == before + 1


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "GET"},
        {"method": "CONNECT"},
        {"method": "DELETE"},
        {"method": None},
        {"content_type": "application/json"},
        {"content_type": None},
        {"te": None},
        {"te": "gzip"},
        {":scheme": None},
    ],
    ids=str,
)
def test_what_is_no_grpc_changes_nothing(secured: Secured, changes: dict[str, Any]) -> None:
    before = _changes(secured)
    answer = _ask(secured, _headers(ACQUIRE, **changes))
    assert answer != OK
    assert _changes(secured) == before
    # gRPC lets a missing `te` or content type pass; authority is asked then as ever.
    answer = _ask(secured, _headers(ACQUIRE, secured.tokens["read"], **changes))
    assert answer != OK
    assert _changes(secured) == before


@pytest.mark.parametrize("name", ["Authorization", "AUTHORIZATION", "authorization-bin"])
def test_other_spellings_of_the_header_prove_nothing(secured: Secured, name: str) -> None:
    before = _changes(secured)
    bearer = f"Bearer {secured.tokens['admin']}"
    assert _ask(secured, [*_headers(ACQUIRE), (name, bearer)]) != OK
    assert _changes(secured) == before


def test_two_headers_in_one_request_prove_nothing(secured: Secured) -> None:
    headers = _headers(ACQUIRE, secured.tokens["admin"])
    assert _ask(secured, [*headers, headers[-1]]) == UNAUTHENTICATED
    # Joined, as HTTP lets proxies do.
    joined = f"{headers[-1][1]}, {headers[-1][1]}"
    assert _ask(secured, [*headers[:-1], ("authorization", joined)]) == UNAUTHENTICATED


def test_garbage_leaves_the_server_alive(secured: Secured) -> None:
    for junk in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 4096, b"\xff" * 100, b"PRI * HTTP/2.0\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", secured.port), timeout=5) as link:
            link.sendall(junk)
            time.sleep(0.05)  # so that the server has read it before the link ends
    channel = secured.channel()
    assert code_of(channel, STATUS, secured.bearer("read")) is grpc.StatusCode.OK
