"""Trainers on the engine's host that have its live parameters."""

from __future__ import annotations

from weightsync_server.attach.attach_metrics import AttachMetrics
from weightsync_server.attach.attach_servicer import AttachServicer, add_attach_service
from weightsync_server.attach.attachments import Attachments
from weightsync_server.attach.in_place_call import InPlaceCalls
from weightsync_server.attach.in_place_versions import InPlaceVersions
from weightsync_server.attach.open_blocks import OpenBlocks

__all__ = [
    "AttachMetrics",
    "AttachServicer",
    "Attachments",
    "InPlaceCalls",
    "InPlaceVersions",
    "OpenBlocks",
    "add_attach_service",
]
