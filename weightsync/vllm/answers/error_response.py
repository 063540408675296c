"""Error answers in the shape of the OpenAI API."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["send_error"]


async def send_error(send: Any, status: int, kind: str, message: str, *, again: bool) -> None:
    """Answer an HTTP request with an error.

    Args:
        send: ASGI's.
        status: HTTP status.
        kind: The OpenAI API's type of error.
        message: One sentence.
        again: Whether it is worth another try after a second.
    """
    body = json.dumps({"error": {"message": message, "type": kind, "code": status}}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *([(b"retry-after", b"1")] if again else ()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
