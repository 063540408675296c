"""Trainers on the engine's host that have its live parameters."""

from __future__ import annotations

from weightsync_server.attach.attachments import Attachments
from weightsync_server.attach.in_place import InPlaceCalls

__all__ = [
    "Attachments",
    "InPlaceCalls",
]
