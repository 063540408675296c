"""A cache before an object store that asks nobody who he is, and answers what the test wants."""

from __future__ import annotations

import contextlib
import http.client
import re
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING

from tests.support.http_handlers import serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["UnaskedCache", "unasked_cache"]

#: Of the cache itself, towards the store: moto takes any.
_AUTHORIZATION = (
    "AWS4-HMAC-SHA256 Credential=cache/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, "
    "Signature=none"
)


@dataclass
class UnaskedCache:
    """One cache.

    Attributes:
        port: Where it listens.
        change: Makes of an object what is given out for it; None: it is not there.
        endless: Whether it sends on and on.
        asked: Paths that were asked for.
    """

    port: int
    change: Callable[[bytes], bytes | None] = lambda data: data
    endless: bool = False
    asked: list[str] = field(default_factory=list)

    def url(self, store: str) -> str:
        """Return where the objects of a store lie, by its `s3://` URL."""
        return f"http://127.0.0.1:{self.port}/{store.removeprefix('s3://')}"


@contextlib.contextmanager
def unasked_cache(behind: int) -> Iterator[UnaskedCache]:
    """Run a cache before an S3 server.

    Args:
        behind: The server's port.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            cache.asked.append(self.path)
            data = cache.change(_object(behind, self.path))
            if data is None:
                self.send_error(404)
                return
            begin, end = map(int, re.findall(r"\d+", self.headers["Range"]))
            part = data[begin : end + 1]
            self.send_response_only(206)
            self.send_header("Content-Range", f"bytes {begin}-{end}/{len(data)}")
            if not cache.endless:
                self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(part)
                while cache.endless:
                    self.wfile.write(bytes(1 << 16))

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with serving(Handler) as port:
        cache = UnaskedCache(port)
        try:
            yield cache
        finally:
            cache.endless = False


def _object(port: int, path: str) -> bytes:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as onward:
        onward.request("GET", path, headers={"Authorization": _AUTHORIZATION})
        reply = onward.getresponse()
        assert reply.status == 200, path
        return reply.read()
