"""Trainers on the engine's host that have its live parameters."""

from __future__ import annotations

from weightsync_server.attach.attach_servicer import AttachServicer, add_attach_service
from weightsync_server.attach.attachments import Attachments

__all__ = ["AttachServicer", "Attachments", "add_attach_service"]
