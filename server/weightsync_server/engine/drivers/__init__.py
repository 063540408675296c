"""The engines that a server can drive; each implements `weightsync.engine.Engine`."""

from __future__ import annotations
