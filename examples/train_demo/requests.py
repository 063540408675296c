"""Requests to vLLM's port, as a program without WeightSync's client sends them."""

from __future__ import annotations

import http.client
import json
from typing import TYPE_CHECKING, Any

from examples.demo.processes import ProcessesError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["healthy", "post", "train"]

_TIMEOUT_S = 60.0


def healthy(port: int) -> bool:
    """Return whether vLLM has started."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except OSError:
        return False
    finally:
        connection.close()


def post(port: int, path: str, token: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON object that a path answers.

    Raises:
        ProcessesError: It was refused.
    """
    connection, answer = _open(port, path, token, body)
    try:
        found: dict[str, Any] = json.loads(answer.read())
        return found
    finally:
        connection.close()


def train(port: int, token: str, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what a job comes to, event by event.

    Raises:
        ProcessesError: It was refused or failed.
    """
    connection, answer = _open(port, "/v1/weightsync/train", token, request)
    try:
        for line in answer:
            if line.startswith(b"data: "):
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise ProcessesError(event.get("traceback", "") + event["error"])
                yield event
    finally:
        connection.close()


def _open(
    port: int, path: str, token: str, body: Mapping[str, Any]
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
    connection.request("POST", path, json.dumps(body), headers)
    answer = connection.getresponse()
    if answer.status != http.HTTPStatus.OK:
        text = answer.read(2000).decode(errors="replace")
        connection.close()
        msg = f"{path} answered {answer.status}: {text}"
        raise ProcessesError(msg)
    return connection, answer
