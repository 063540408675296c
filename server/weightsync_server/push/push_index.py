"""Finding a push again, by its id or its idempotency key, for as long as its version exists."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.push.partial_push import check_same_part

if TYPE_CHECKING:
    from weightsync_server.catalog.table import VersionTable
    from weightsync_server.push.parts import Push
    from weightsync_server.push.resume import RecoveredPushes


class PushIndex:
    """All pushes that can be asked about. Of committed ones the table is the truth.

    It keeps `remembered` ended pushes, and reports a failed one for `failures_s` to writers that
    had not come. `open` has those neither committed nor failed, by id.
    """

    def __init__(
        self,
        table: VersionTable,
        recovered: RecoveredPushes,
        remembered: int,
        failures_s: float,
    ) -> None:
        self.open: dict[str, Push] = {}
        self._table = table
        self._recovered = recovered
        self._remembered = remembered
        self._failures_s = failures_s
        self._ended: OrderedDict[str, Push] = OrderedDict()

    def end(self, push: Push) -> None:
        self.open.pop(push.state.id, None)
        self._ended[push.state.id] = push
        while len(self._ended) > self._remembered:
            self._ended.popitem(last=False)

    def find(self, push_id: str) -> Push | None:
        """Return a push by its id: open, ended lately, or of a version that exists."""
        push = self.open.get(push_id) or self._ended.get(push_id)
        if push is not None or not push_id:
            return push
        return self._recovered.committed(push_id=push_id)

    def with_key(self, key: str) -> Push | None:
        """Return the push of a key: open, or committed as a version that still exists."""
        if not key:
            # Many have none, and none of them is meant.
            return None
        for push in self.open.values():
            if push.state.request.idempotency_key == key and push.state.error is None:
                return push
        if (brought := self._recovered.committed(key=key)) is not None:
            return brought
        # A push that repeated a version left its key nowhere else.
        for push in reversed(self._ended.values()):
            if push.state.request.idempotency_key == key and self._exists(push):
                return push
        return None

    def failed_with(self, key: str, writer: int) -> Push | None:
        """Return the last push of a key, once, if it failed before this writer came.

        One that failed long ago is not returned: the writer is of another job.
        """
        latest = asyncio.get_running_loop().time() - self._failures_s
        # One that has failed is still open until it has freed everything.
        for push in [*reversed(self.open.values()), *reversed(self._ended.values())]:
            state = push.state
            if state.request.idempotency_key != key:
                continue
            if state.error is None or writer not in state.writers.absent:
                return None
            if state.failed_at < latest:
                return None
            state.writers.come(writer)
            return push
        return None

    def _exists(self, push: Push) -> bool:
        record = self._table.committed(push.state.record.version)
        if push.state.committed is None or record is None:
            return False
        return record.content_digest == push.state.committed.content_digest


def check_same_push(push: Push, request: pb.BeginPushRequest) -> None:
    """Refuse a begin whose key belongs to a push of something else.

    If that push is open and may be dropped, the refusal has its id.
    """
    if push.state.writers.several and push.state.committed is None:
        check_same_part(push.state, request)
        _check_same_writers(push.state.request, request)
    version = push.state.record.version
    if request.version not in (0, version):
        raise _conflict(f"a push of version {version}")
    if dict(request.metadata) != push.state.record.metadata:
        raise _conflict(f"a push of version {version} with other metadata")
    delta = request.kind == pb.PUSH_KIND_DELTA
    if push.state.committed is not None:
        # A delta tells its own size, which is another one each time that it is encoded, and who
        # brings some tensors theirs.
        if not (delta or request.partial) and request.total_bytes not in (
            0,
            push.state.committed.size_bytes,
        ):
            raise _conflict(f"version {version}, which has {push.state.committed.size_bytes} bytes")
        return
    if (others := max(push.state.request.writers, 1)) != max(request.writers, 1):
        raise _conflict(f"an open push of {others} writers, not {max(request.writers, 1)}", push)
    # Each of several writers sends what changed, or all.
    if delta != (push.state.delta is not None) and not push.state.writers.several:
        raise _conflict("an open push of another kind", push)
    total = push.state.request.total_bytes
    if total and request.total_bytes not in (0, total):
        raise _conflict(f"an open push of {total} bytes", push)


def _check_same_writers(first: pb.BeginPushRequest, request: pb.BeginPushRequest) -> None:
    for field in ("writers", "total_bytes", "shard_count"):
        ours, theirs = getattr(first, field), getattr(request, field)
        if ours != theirs:
            raise WeightSyncError(
                Reason.LAYOUT_INVALID,
                f"writer {request.writer} declares {theirs} as {field}, but writer {first.writer} "
                f"{ours}; declare the same for the whole version in all writers of a push",
                metadata={"writer": str(request.writer)},
            )


def _conflict(what: str, droppable: Push | None = None) -> WeightSyncError:
    remedy = "abort that one, or choose another key" if droppable else "choose another key"
    return WeightSyncError(
        Reason.VERSION_CONFLICT,
        f"the idempotency key belongs to {what}; {remedy}",
        metadata={"push_id": droppable.state.id} if droppable else {},
    )
