"""What all engines of one host share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightsync_server.engine.serving_time import ServingTime

if TYPE_CHECKING:
    from weightsync.shm.segment_socket import SegmentServer
    from weightsync_server.engine.apply_limits import ApplyLimits
    from weightsync_server.ops.metrics import Metrics

__all__ = ["HostParts"]


@dataclass(frozen=True)
class HostParts:
    """The server's side of every engine.

    Attributes:
        segments: The segment socket.
        metrics: Where the state of engines is shown.
        limits: Timeouts.
        fleet: Whose member this host is: then that alone makes versions live; "": of none.
        joining: Who has it decides what the engines serve: an apply of all of them as long as it
            lasts, and one that is found to hold a version while it begins to serve it.
        serving_time: For how long the engines may serve without this server, and begin to.
    """

    segments: SegmentServer
    metrics: Metrics
    limits: ApplyLimits
    fleet: str = ""
    joining: asyncio.Lock = field(default_factory=asyncio.Lock)
    serving_time: ServingTime = field(default_factory=ServingTime)
