"""The parts of one push; and what the ways in may ask of all pushes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.ops.metrics import Meters

if TYPE_CHECKING:
    from weightsync_server.model import Model
    from weightsync_server.push.layout_parts import PushLayout
    from weightsync_server.push.lifecycle import PushLifecycle
    from weightsync_server.push.pipeline import Checkpointer, ShardPipeline
    from weightsync_server.push.progress import PushAnnouncement
    from weightsync_server.push.push_settings import PushSettings
    from weightsync_server.push.reservation import PushReservation
    from weightsync_server.push.slice_changes import SliceBases
    from weightsync_server.push.slice_parts import PushSlices
    from weightsync_server.push.state import PushState


@dataclass(frozen=True, slots=True, eq=False)
class Push:
    """One push.

    `slices` takes what each of several writers declares, `bases` holds what they send changes of,
    and `announcement` is what engines know of the push.
    """

    state: PushState
    lifecycle: PushLifecycle
    pipeline: ShardPipeline
    layout: PushLayout
    slices: PushSlices
    bases: SliceBases
    reservation: PushReservation
    checkpointer: Checkpointer
    announcement: PushAnnouncement
    model: Model
    limits: PushSettings


class Pushes(Protocol):
    """What a way in asks of all pushes; `weightsync_server.push.service.PushService` is this."""

    limits: PushSettings
    meters: Meters

    def find(self, push_id: str) -> Push:
        """See `PushService.find`."""

    async def open(
        self, request: pb.BeginPushRequest, deadline_s: float | None, who: str = ""
    ) -> Push:
        """See `PushService.open`."""

    async def commit_push(self, push: Push, request: pb.CommitPushRequest) -> pb.CommitPushResponse:
        """See `PushService.commit_push`."""
