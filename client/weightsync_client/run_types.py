"""What the client returns of who pushes; see `types`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ClientRun"]


@dataclass(frozen=True, slots=True)
class ClientRun:
    """A run of a client that pushed: its newest version, how many exist, and whose the epoch is."""

    client_run: str
    newest_version: int
    versions: int
    has_epoch: bool
