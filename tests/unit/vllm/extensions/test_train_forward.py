"""What vLLM's port passes on to the server, and how: real HTTP on both sides."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from benchmarks.servers import free_port
from tests.support.asgi_site import serving_app
from tests.support.certificates import Authority
from tests.support.http_handlers import serving
from weightsync.vllm.extensions import train_forward
from weightsync.vllm.extensions.train_forward import TrainForward, Upstream

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

applications = pytest.importorskip("starlette.applications")
responses = pytest.importorskip("starlette.responses")
routing = pytest.importorskip("starlette.routing")
pytest.importorskip("aiohttp")
pytest.importorskip("uvicorn")

_TRAIN, _STATUS = "/v1/weightsync/train", "/v1/weightsync/train/status"


class _Server:
    """Stands for weightsync-server's HTTP API.

    Attributes:
        asked: Method, path, headers and body of every request.
        status: Of its answers.
        body: Of its answers; a stream has its parts.
        headers: Of its answers.
        go_on: Lets a stream have its second part.
        left: Set when the other end of a stream has gone.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, dict[str, str], bytes]] = []
        self.status = 200
        self.body: bytes | list[bytes] = b'{"state": "ready"}\n'
        self.headers = {"Content-Type": "application/json"}
        self.go_on = threading.Event()
        self.left = threading.Event()

    def handler(site) -> type[BaseHTTPRequestHandler]:  # noqa: N805 - the handler has a self too
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                fields = {name.lower(): value for name, value in self.headers.items()}
                site.asked.append((self.command, self.path, fields, body))
                self.send_response(site.status)
                for name, value in site.headers.items():
                    self.send_header(name, value)
                if isinstance(site.body, bytes):
                    self.send_header("Content-Length", str(len(site.body)))
                    self.end_headers()
                    self.wfile.write(site.body)
                else:
                    self._stream(site.body)

            do_GET = do_POST  # noqa: N815 - the name of http.server

            def _stream(self, parts: list[bytes]) -> None:
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for part in parts:
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
                    self.wfile.flush()
                    site.go_on.wait(20)
                if parts[-1] == b"broken":
                    self.close_connection = True
                    return
                if parts[-1] == b"hang":
                    # Nothing comes from there but its end.
                    self.rfile.read(1)
                    site.left.set()
                self.wfile.write(b"0\r\n\r\n")

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


@pytest.fixture
def server() -> _Server:
    return _Server()


@pytest.fixture
def state(server: _Server) -> Iterator[TrainForward]:
    with serving(server.handler()) as port:
        made = TrainForward()
        made.upstream = Upstream(f"http://127.0.0.1:{port}")
        yield made
        server.go_on.set()


async def _vllm(_: Any) -> Any:
    return responses.PlainTextResponse("vLLM")


@pytest.fixture
def url(state: TrainForward) -> Iterator[str]:
    app = applications.Starlette(routes=[routing.Route("/{path:path}", _vllm, methods=["POST"])])
    app.add_middleware(state.wrap)
    with serving_app(app) as address:
        yield address


def test_a_request_goes_on_as_it_came(url: str, server: _Server) -> None:
    headers = {"Authorization": "Bearer t", "Forwarded": "for=me", "X-Else": "1", "Cookie": "c"}
    answer = httpx.post(f"{url}{_TRAIN}?a=%20b&c", headers=headers, content=b'{"text": "x"}')
    assert (answer.status_code, answer.json()) == (200, {"state": "ready"})
    ((method, path, found, body),) = server.asked
    assert (method, path, body) == ("POST", f"{_TRAIN}?a=%20b&c", b'{"text": "x"}')
    assert found["authorization"] == "Bearer t"
    # Where it came from, whatever it says itself; nothing of it that nobody asked for.
    assert found["forwarded"].startswith('for="127.0.0.1:')
    assert not {"x-else", "cookie"} & found.keys()


def test_nothing_proves_a_caller_that_proves_nothing(url: str, server: _Server) -> None:
    httpx.get(f"{url}{_STATUS}")
    assert "authorization" not in server.asked[0][2]
    # Where vLLM has taken Authorization for its own key.
    keys = {"Authorization": "Bearer vllm", "X-WeightSync-Token": "ours"}
    httpx.get(f"{url}{_STATUS}", headers=keys)
    assert server.asked[1][2]["authorization"] == "Bearer ours"


def test_refusals_come_back_as_they_are(url: str, server: _Server) -> None:
    server.status, server.body = 401, b'{"error": "no", "reason": "UNAUTHENTICATED"}\n'
    server.headers |= {"WWW-Authenticate": "Bearer", "Retry-After": "3", "Connection": "x"}
    answer = httpx.post(f"{url}{_TRAIN}")
    assert (answer.status_code, answer.json()["reason"]) == (401, "UNAUTHENTICATED")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["retry-after"] == "3"
    assert answer.headers.get("connection") != "x"


def test_other_paths_are_vllm_s(url: str, server: _Server) -> None:
    for path in ("/v1/completions", f"{_TRAIN}/", "/v1/weightsync", f"{_TRAIN}/../train"):
        assert httpx.post(url + path).status_code in (200, 404)
    assert not [path for _, path, *_ in server.asked if path != _TRAIN]


def test_a_stream_comes_part_by_part(url: str, server: _Server) -> None:
    server.headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    server.body = [b'data: {"event": "queued"}\n\n', b'data: {"event": "finished"}\n\n']
    with httpx.stream("POST", f"{url}{_TRAIN}", timeout=20) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["cache-control"] == "no-cache"
        parts = answer.iter_bytes()
        assert next(parts) == server.body[0], "the first part does not wait for the second"
        server.go_on.set()
        assert b"".join(parts) == server.body[1]


def test_a_stream_that_breaks_off_says_so(url: str, server: _Server) -> None:
    server.headers = {"Content-Type": "text/event-stream"}
    server.body = [b'data: {"event": "queued"}\n\n', b"broken"]
    server.go_on.set()
    events = httpx.post(f"{url}{_TRAIN}", timeout=20).text.split("data: ")
    assert json.loads(events[-1])["reason"] == "SERVER_AWAY"


def test_who_leaves_is_missed_at_the_server(url: str, server: _Server) -> None:
    server.headers = {"Content-Type": "text/event-stream"}
    server.body = [b'data: {"event": "queued"}\n\n', b"hang"]
    server.go_on.set()
    with httpx.stream("POST", f"{url}{_TRAIN}", timeout=20) as answer:
        next(answer.iter_bytes())
    assert server.left.wait(20)


def test_a_body_that_is_too_long_goes_nowhere(url: str, server: _Server) -> None:
    # In pieces, so that no length is named.
    answer = httpx.post(f"{url}{_TRAIN}", content=(b"a" * 100_000 for _ in range(12)))
    assert (answer.status_code, answer.json()["reason"]) == (413, "REQUEST_INVALID")
    assert not server.asked
    assert httpx.post(f"{url}{_TRAIN}", content=b" " * (1 << 20)).status_code == 200


def test_no_more_requests_at_once_than_there_may_be(
    url: str, server: _Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_forward, "_MOST", 1)
    server.headers = {"Content-Type": "text/event-stream"}
    server.body = [b"data: {}\n\n"]
    with httpx.stream("POST", f"{url}{_TRAIN}", timeout=20) as first:
        # Kept: one that is collected ends the request.
        parts = first.iter_bytes()
        next(parts)
        second = httpx.post(f"{url}{_TRAIN}")
    assert (second.status_code, second.json()["reason"]) == (503, "LIMIT_EXCEEDED")


def test_a_server_that_is_not_known_or_does_not_answer(url: str, state: TrainForward) -> None:
    state.upstream = None
    answer = httpx.post(f"{url}{_TRAIN}")
    assert (answer.status_code, answer.json()["reason"]) == (501, "NOT_SUPPORTED")
    assert "set WEIGHTSYNC_HTTP" in answer.json()["error"]
    state.upstream = Upstream(f"http://127.0.0.1:{free_port()}")
    answer = httpx.post(f"{url}{_TRAIN}")
    assert (answer.status_code, answer.json()["reason"]) == (503, "SERVER_AWAY")
    assert "check that it runs with --http" in answer.json()["error"]


def test_tls_by_the_ca_that_is_named(url: str, state: TrainForward, tmp_path: Path) -> None:
    ours, other = Authority(tmp_path / "ours"), Authority(tmp_path / "other")
    pair = ours.sign("server", "localhost")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.certificate, pair.key)
    with _tls_server(context) as port:
        state.upstream = Upstream(f"https://localhost:{port}", str(ours.ca))
        assert httpx.get(f"{url}{_STATUS}").json() == {"tls": True}
        for ca in (str(other.ca), str(tmp_path / "absent.pem"), ""):
            state.upstream = Upstream(f"https://localhost:{port}", ca)
            assert httpx.get(f"{url}{_STATUS}").json()["reason"] == "SERVER_AWAY"


@contextlib.contextmanager
def _tls_server(context: ssl.SSLContext) -> Iterator[int]:
    from http.server import ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(b'{"tls": true}')

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: Any) -> None:
            """Say nothing of clients that trust another authority."""

    made = Server(("127.0.0.1", 0), Handler)
    made.daemon_threads = True
    made.socket = context.wrap_socket(made.socket, server_side=True)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    try:
        yield made.server_port
    finally:
        made.shutdown()
        made.server_close()
        thread.join()
