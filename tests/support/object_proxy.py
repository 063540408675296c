"""A proxy before an object store that throttles, loses answers, or takes conditions away."""

from __future__ import annotations

import contextlib
import http.client
import threading
from dataclasses import dataclass, field
from enum import Enum, auto
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, ClassVar

from tests.support.http_handlers import serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Fault", "ObjectProxy", "object_proxy"]

#: Of one connection only, and not passed on.
_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "expect"})


class Fault(Enum):
    """What happens to a request."""

    NONE = auto()
    #: It is refused with 503.
    THROTTLE = auto()
    #: It is done, and nobody is told.
    LOSE_REPLY = auto()
    #: It is done, and the answer never comes.
    STALL = auto()
    #: It arrives without its condition.
    IGNORE_CONDITION = auto()


@dataclass
class ObjectProxy:
    """One proxy.

    Attributes:
        port: Where it listens.
        fault: Tells by number, method and path what happens to a request.
        met: How often which fault happened.
    """

    port: int
    fault: Callable[[int, str, str], Fault] = lambda _number, _method, _path: Fault.NONE
    met: dict[Fault, int] = field(default_factory=lambda: dict.fromkeys(Fault, 0))


@contextlib.contextmanager
def object_proxy(behind: int) -> Iterator[ObjectProxy]:
    """Run a proxy before a server.

    Args:
        behind: The server's port.
    """
    lock, stopped = threading.Lock(), threading.Event()
    numbers = iter(range(1 << 30))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm: ClassVar[bool] = True

        def handle(self) -> None:
            # Who hangs up, or is hung up on, need not be told here.
            with contextlib.suppress(OSError, http.client.HTTPException):
                super().handle()

        def _pass(self) -> None:
            body = self._body()
            with lock:
                fault = proxy.fault(next(numbers), self.command, self.path)
                proxy.met[fault] += 1
            if fault is Fault.THROTTLE:
                self._answer(503, [], b"<Error><Code>SlowDown</Code></Error>")
                return
            headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP}
            if fault is Fault.IGNORE_CONDITION:
                headers = {k: v for k, v in headers.items() if k.lower() != "if-none-match"}
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", behind)) as onward:
                onward.request(self.command, self.path, body, headers)
                reply = onward.getresponse()
                data = reply.read()
                if fault in (Fault.LOSE_REPLY, Fault.STALL):
                    if fault is Fault.STALL:
                        stopped.wait()
                    self.close_connection = True
                    return
                self._answer(reply.status, reply.getheaders(), data)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass  # noqa: N815 - http.server's names

        def _body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes) -> None:
            self.send_response_only(status)
            length = str(len(data))
            for name, value in headers:
                if name.lower() == "content-length" and self.command == "HEAD":
                    length = value
                if name.lower() not in _HOP:
                    self.send_header(name, value)
            self.send_header("Content-Length", length)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with serving(Handler) as port:
        proxy = ObjectProxy(port)
        try:
            yield proxy
        finally:
            stopped.set()
