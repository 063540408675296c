"""The bytes of the last version that a client committed, and the turn of those who use them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from weightsync.errors import Reason
from weightsync.model.digest import content_digest
from weightsync_client.errors import cancelled_error, refuse
from weightsync_client.push_reasons import Fallback, Unfit
from weightsync_client.snapshot.copy_budget import room_for, roomy
from weightsync_client.snapshot.snapshot import Snapshot, SnapshotCapture, StreamingCapture
from weightsync_client.source.tensors import Scratch, settle

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from weightsync.model.manifest import Layout
    from weightsync_client.snapshot.host_tensor import SnapshotTensor
    from weightsync_client.source.tensors import SourceTensor
    from weightsync_client.types import PushResult

__all__ = ["SnapshotStore", "read_snapshot"]

logger = logging.getLogger(__name__)

_TURN_S = 0.1


def _make(
    tensors: Iterable[SourceTensor], devices: frozenset[torch.device | None]
) -> dict[str, SnapshotTensor]:
    """Return memory for tensors: on those devices, else on the host.

    Raises:
        MemoryError: There is none, for all that was counted.
    """
    from weightsync_client.snapshot.host_tensor import HostTensor

    if not devices:
        return {tensor.name: HostTensor(tensor) for tensor in tensors}
    from weightsync_client.snapshot.device_tensor import DeviceTensor

    made: dict[str, SnapshotTensor] = {
        tensor.name: DeviceTensor(tensor) if tensor.device in devices else HostTensor(tensor)
        for tensor in tensors
    }
    for device in devices:
        if device is not None:
            # The memory may have been somebody's, whose work on it is queued still; other streams
            # are about to write there.
            settle(device)
    return made


def read_snapshot(layout: Layout, tensors: Sequence[SourceTensor]) -> Snapshot:
    """Return a copy of tensors; its version is not known yet.

    Raises:
        ClientError: MEMORY_EXHAUSTED.
    """
    devices, enough = roomy(tensors)
    if not enough:
        raise refuse(
            Reason.MEMORY_EXHAUSTED,
            f"there is no room for a copy of {layout.size} bytes; free memory, or push in full",
        )
    scratch, copies = Scratch(), _make(tensors, devices)
    for tensor in tensors:
        copies[tensor.name].fill(tensor, scratch)
    digest = content_digest((name, t.dtype, t.shape, t.digest) for name, t in copies.items())
    return Snapshot(0, digest, layout.size, layout.signature, "", copies)


class SnapshotStore:
    """What the next delta is made against: the last version that was kept, or nothing.

    Never a mixture: a version takes its place when its commit is acknowledged, whole. A push that
    fails leaves what there was. A push in full gives it up first where memory does not suffice for
    two versions, and where it needs the memory for what an iterable has given to a delta.

    Pushes that use the snapshot take turns, in the order in which they came.
    """

    def __init__(self) -> None:
        self.current: Snapshot | None = None
        self._changed = threading.Condition()
        self._turns: deque[object] = deque()

    def line_up(self) -> object:
        """Take a place in the line; `turn` waits until it is at the head, and gives it up."""
        ticket = object()
        with self._changed:
            self._turns.append(ticket)
        return ticket

    def leave(self, ticket: object) -> None:
        """Give up a place in the line that `turn` was never asked for."""
        with self._changed:
            self._turns.remove(ticket)
            self._changed.notify_all()

    @contextlib.contextmanager
    def turn(self, ticket: object, stop: threading.Event) -> Iterator[None]:
        """Hold the snapshot, once those who came before have let go of it.

        Raises:
            AbortedError: `stop` was set meanwhile.
        """
        try:
            with self._changed:
                while self._turns[0] is not ticket and not stop.is_set():
                    self._changed.wait(_TURN_S)
            if stop.is_set():
                raise cancelled_error()
            yield
        finally:
            self.leave(ticket)

    def base_of(self, signature: str | None, run_id: str) -> Snapshot:
        """Return the version that a delta of such a version can be made against.

        Args:
            signature: Digest of the names, dtypes and shapes of the new version; None: they are
                seen as the tensors come.
            run_id: Of its metadata; empty: none.

        Raises:
            Unfit: There is none.
        """
        base = self.current
        if base is None:
            raise Unfit(Fallback.FIRST, "this client holds no version that it has committed")
        if run_id and base.run_id and run_id != base.run_id:
            raise Unfit(Fallback.NEW_RUN, f"version {base.version} is of the run {base.run_id!r}")
        if signature not in (None, base.signature):
            raise Unfit(
                Fallback.LAYOUT_CHANGED,
                f"names, dtypes or shapes are not those of version {base.version}",
            )
        return base

    def take(self, tensors: Sequence[SourceTensor]) -> SnapshotCapture | None:
        """Return where the bytes of a push in full are kept; None where there is no room."""
        devices, enough = roomy(tensors)
        wanted = {tensor.device for tensor in tensors if tensor.device is not None}
        if self.current is not None and not (enough and devices >= wanted):
            self.current = None
            devices, enough = roomy(tensors)
        if not enough:
            return None
        try:
            return SnapshotCapture(_make(tensors, devices))
        except MemoryError:
            return None

    def take_flow(self, read: Mapping[str, SnapshotTensor]) -> StreamingCapture:
        """Return where the bytes of a push in full are kept that come one after the other.

        Args:
            read: Tensors that hold theirs.
        """
        if self.current is not None and not room_for(self.current.size):
            self.current = None
        return StreamingCapture(read)

    def advance(
        self,
        base: Snapshot,
        result: PushResult,
        run_id: str,
        blobs: Sequence[NDArray[np.uint8]],
        threads: int,
    ) -> None:
        """Become the version that a delta of `base` has made, by the shards that were committed."""
        self.current = None
        try:
            base.advance(blobs, threads)
        except Exception:
            # The version is committed all the same. The next push finds no base and is in full.
            logger.exception("the copy of version %d is given up", base.version)
            return
        self.current = replace(
            base,
            version=result.version,
            content_digest=result.content_digest,
            run_id=run_id,
        )
