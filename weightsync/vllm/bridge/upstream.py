"""The HTTP API of weightsync-server, as the bridge reaches it: with no token of its own."""

from __future__ import annotations

import contextlib
import ssl
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

__all__ = ["Upstream", "UpstreamError"]

_CONNECT_S = 5.0


class UpstreamError(Exception):
    """The server did not answer, or its answer broke off; the message says why."""


class Upstream(NamedTuple):
    """Where it is.

    Attributes:
        url: http://HOST:PORT or https://HOST:PORT.
        ca: PEM file of the authorities of its certificate; empty: those of this host.
    """

    url: str
    ca: str = ""

    @contextlib.asynccontextmanager
    async def ask(
        self,
        method: str,
        path: str,
        headers: Sequence[tuple[str, str]],
        body: bytes,
        silence_s: float,
    ) -> AsyncIterator[Any]:
        """Yield the answer to a request, as aiohttp has it; leaving the block ends it.

        Args:
            method: Of the request.
            path: With its query, as it came.
            headers: All but those that HTTP needs.
            body: Of the request.
            silence_s: Longest time without a byte of the answer, seconds.

        Raises:
            UpstreamError: The server does not answer, or not to its end.
        """
        import aiohttp
        from yarl import URL

        limits = aiohttp.ClientTimeout(sock_connect=_CONNECT_S, sock_read=silence_s)
        try:
            # One a request: requests are few, and none finds a connection of another.
            async with (
                aiohttp.ClientSession(auto_decompress=False, timeout=limits) as session,
                session.request(
                    method,
                    URL(self.url + path, encoded=True),
                    headers=headers,
                    data=body,
                    ssl=self._context(),
                    allow_redirects=False,
                ) as answer,
            ):
                yield answer
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise UpstreamError(str(error) or type(error).__name__) from error

    def _context(self) -> ssl.SSLContext | bool:
        # Read for each request, so that the file may be replaced.
        return ssl.create_default_context(cafile=self.ca) if self.ca else True
