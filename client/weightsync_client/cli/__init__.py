"""The command `weightsync`."""

from __future__ import annotations

from weightsync_client.cli.main import main

__all__ = ["main"]
