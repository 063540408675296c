"""Waits for a server that a test has started as a user does."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from weightsync_client import Client, ClientError

if TYPE_CHECKING:
    import subprocess

__all__ = ["wait_serving"]


def wait_serving(server: subprocess.Popen[Any], client: Client, seconds: float) -> None:
    """Return when the engine beside a server serves, which is still alive then."""
    end = time.monotonic() + seconds
    while not _serving(client):
        assert server.poll() is None
        assert time.monotonic() < end
        time.sleep(0.1)


def _serving(client: Client) -> bool:
    try:
        return client.health("serving")
    except ClientError:
        return False
