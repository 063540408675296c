"""A push is put together of its parts."""

from __future__ import annotations

import secrets
from functools import partial
from typing import TYPE_CHECKING

from weightsync_server.auth.callers import caller
from weightsync_server.push.announcement import PushAnnouncement
from weightsync_server.push.box_bases import BoxBases
from weightsync_server.push.box_parts import PushBoxes
from weightsync_server.push.checkpoint import Checkpointer
from weightsync_server.push.delta_push import DeltaPush
from weightsync_server.push.layout_parts import PushLayout
from weightsync_server.push.lifecycle import PushLifecycle
from weightsync_server.push.part_push import PartPush
from weightsync_server.push.parts import Push
from weightsync_server.push.pipeline import ShardPipeline
from weightsync_server.push.progress import has_all, is_reading_back, received
from weightsync_server.push.reservation import PushReservation
from weightsync_server.push.state import PushState
from weightsync_server.push.suspension import suspend
from weightsync_server.push.writers import Writers

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync.v1 import weightsync_pb2 as pb
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.model import Model
    from weightsync_server.ops.meters import Meters
    from weightsync_server.push.limits import PushLimits

__all__ = ["PushFactory"]


class PushFactory:
    """Makes the pushes of one model.

    Args:
        model: The model.
        limits: Bounds on each push.
        meters: Counts.
        on_end: Called when a push is committed, or has failed and freed everything.
    """

    def __init__(
        self,
        model: Model,
        limits: PushLimits,
        meters: Meters,
        on_end: Callable[[Push], None],
    ) -> None:
        self._model = model
        self._limits = limits
        self._meters = meters
        self._on_end = on_end

    def make(
        self,
        record: VersionRecord,
        request: pb.BeginPushRequest,
        *,
        push_id: str = "",
        existing: VersionRecord | None = None,
        base: VersionRecord | None = None,
    ) -> Push:
        """Return a push that has nothing yet.

        Args:
            record: The version that it brings.
            request: The call that opened it.
            push_id: The id that it has already; empty: it gets one.
            existing: The version that it repeats, or the live one that failed to commit.
            base: The version that it changes, or keeps tensors of; None: it is in full.
        """
        push_id = push_id or secrets.token_hex(16)
        record.push_id, record.key = push_id, request.idempotency_key
        state = PushState(push_id, caller.get(), request, record, existing)
        state.shard_count = request.shard_count
        if base is not None:
            facts = self._model, record, base, self._meters
            state.delta = (
                PartPush(*facts, request.total_bytes, request.shard_count)
                if request.partial
                else DeltaPush(*facts)
            )
            # It has the tensors of its base.
            record.layout_check = base.layout_check
        return self._assembled(state)

    def _assembled(self, state: PushState) -> Push:
        model, limits, meters = self._model, self._limits, self._meters
        reservation = PushReservation(state, model.store, model.slots, model.disk)
        announcement = PushAnnouncement(state, model.incoming)
        checkpointer = Checkpointer(reservation, model.fetch, limits, meters)
        bases = BoxBases(state, model)

        def end() -> None:
            push.layout.clear()
            push.boxes.clear()
            bases.close()
            self._on_end(push)

        lifecycle = PushLifecycle(
            state,
            model.orphans,
            limits,
            meters,
            reservation,
            announcement,
            suspend=lambda: suspend(push),
            on_end=end,
        )
        pipeline = ShardPipeline(
            state,
            lifecycle,
            reservation,
            checkpointer,
            announcement,
            model.table,
            model.commits,
            model.fetch,
            meters,
        )
        if state.request.writers > 1:
            state.writers = Writers(
                state.request.writers,
                limits.writer_timeout_s,
                partial(received, state),
                partial(has_all, state),
                partial(is_reading_back, state),
                lambda error: lifecycle.fail(error, "aborted"),
            )
        push = Push(
            state,
            lifecycle,
            pipeline,
            PushLayout(state, reservation, model.accepted, model.engine_layouts, limits, pipeline),
            PushBoxes(state, limits, bases, pipeline),
            bases,
            reservation,
            checkpointer,
            announcement,
            model,
            limits,
        )
        return push
