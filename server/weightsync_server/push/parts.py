"""The parts of one push; and what the ways in may ask of all pushes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from weightsync.v1 import weightsync_pb2 as pb
    from weightsync_server.model import Model
    from weightsync_server.ops.meters import Meters
    from weightsync_server.push.announcement import PushAnnouncement
    from weightsync_server.push.box_bases import BoxBases
    from weightsync_server.push.box_parts import PushBoxes
    from weightsync_server.push.checkpoint import Checkpointer
    from weightsync_server.push.layout_parts import PushLayout
    from weightsync_server.push.lifecycle import PushLifecycle
    from weightsync_server.push.limits import PushLimits
    from weightsync_server.push.pipeline import ShardPipeline
    from weightsync_server.push.reservation import PushReservation
    from weightsync_server.push.state import PushState

__all__ = ["Push", "Pushes"]


@dataclass(frozen=True, slots=True, eq=False)
class Push:
    """One push.

    Attributes:
        state: What is known of it.
        lifecycle: Begins and ends it.
        pipeline: Takes its shards on.
        layout: Takes what its trainer declares of them.
        boxes: Takes what each of several writers declares that it brings of them.
        bases: What these send changes of.
        reservation: What it was promised on disk and in memory.
        checkpointer: Makes its shards durable as they come.
        announcement: What engines know of it.
        model: What it becomes a version of.
        limits: Bounds on it.
    """

    state: PushState
    lifecycle: PushLifecycle
    pipeline: ShardPipeline
    layout: PushLayout
    boxes: PushBoxes
    bases: BoxBases
    reservation: PushReservation
    checkpointer: Checkpointer
    announcement: PushAnnouncement
    model: Model
    limits: PushLimits


class Pushes(Protocol):
    """What a way in asks of all pushes; `weightsync_server.push.service.PushService` is this."""

    limits: PushLimits
    meters: Meters

    def find(self, push_id: str) -> Push:
        """Return a push; see `PushService.find`."""

    async def open(self, request: pb.BeginPushRequest, deadline_s: float | None) -> Push:
        """Return the push that a begin opens or joins; see `PushService.open`."""

    async def commit_push(self, push: Push, request: pb.CommitPushRequest) -> pb.CommitPushResponse:
        """Commit one push; see `PushService.commit_push`."""
