"""The bytes of a version, held whole, and how they get there while they are sent."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from weightsync.errors import Reason
from weightsync.model.digest import content_digest, signature_of
from weightsync.model.manifest import Layout
from weightsync.process_limits import available_bytes
from weightsync_client.errors import cancelled_error, refuse
from weightsync_client.push_reasons import DeltaUnsuitable, Fallback
from weightsync_client.source.tensors import Scratch, settle

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from weightsync.delta import Changes, Item, Later
    from weightsync_client.snapshot.host_tensor import BaseTensor, SnapshotTensor
    from weightsync_client.source.tensors import SourceTensor
    from weightsync_client.types import PushResult

#: Left to everything else: an eighth of what is asked for, and this much at least.
_MARGIN = 256 << 20
#: One in so many of a device's bytes stays free: the next step may need more than this one did.
_DEVICE_SHARE = 4


def _with_margin(size: int) -> int:
    return size + max(size // 8, _MARGIN)


def room_for(size: int) -> bool:
    """Return whether the host and the cgroups around this process can well do without `size`."""
    return _with_margin(size) <= available_bytes()


def _device_room_for(device: torch.device, size: int) -> bool:
    module: Any = getattr(sys.modules["torch"], device.type, None)
    if not hasattr(module, "mem_get_info"):
        return False
    free, total = module.mem_get_info(device)
    # What PyTorch holds and does not use counts as free.
    free += module.memory_reserved(device) - module.memory_allocated(device)
    return size <= int(free) - int(total) // _DEVICE_SHARE


def roomy(tensors: Iterable[SourceTensor]) -> tuple[frozenset[torch.device | None], bool]:
    """Return devices with room to copy their tensors, and whether the host has it for the rest."""
    sizes: Counter[torch.device | None] = Counter()
    for tensor in tensors:
        sizes[tensor.device] += tensor.size
    devices = {d for d, size in sizes.items() if d is not None and _device_room_for(d, size)}
    rest = sum(size for device, size in sizes.items() if device not in devices)
    return frozenset(devices), rest == 0 or room_for(rest)


@dataclass(frozen=True, slots=True)
class BaseVersion:
    """A version that a delta is made against, bound to its `content_digest`.

    `size` is the bytes that this process sends when it pushes the version in full. `run_id` is
    empty if the metadata has none.
    """

    version: int
    content_digest: str
    size: int
    signature: str
    run_id: str
    tensors: Mapping[str, BaseTensor]

    def items(
        self, tensors: Sequence[SourceTensor], scratch: Scratch
    ) -> list[Item | Later | Changes]:
        """Return tensors before and after, for the encoder.

        Raises DeltaUnsuitable if a device has no room.
        """
        found: dict[str, Item | Later | Changes] = {}
        together: dict[torch.device, list[SourceTensor]] = {}
        for tensor in tensors:
            base = self.tensors[tensor.name]
            if base.device is None:
                found[tensor.name] = base.item(tensor, scratch)
            else:
                together.setdefault(base.device, []).append(tensor)
        for group in together.values():
            found |= self._compared(group)
        return [found[tensor.name] for tensor in tensors]

    def _compared(self, tensors: Sequence[SourceTensor]) -> dict[str, Changes]:
        from weightsync_client.snapshot.device_tensor import DeviceTensor, changes_of

        pairs = [(cast("DeviceTensor", self.tensors[tensor.name]), tensor) for tensor in tensors]
        return {changes.name: changes for changes in changes_of(pairs)}

    def advance(self, blobs: Iterable[NDArray[np.uint8]], threads: int) -> None:
        from weightsync.delta import parse_shard

        expect = {name: (t.dtype, t.shape) for name, t in self.tensors.items()}
        with ThreadPoolExecutor(threads, "weightsync-advance") as pool:
            for blob in blobs:
                changes = parse_shard(blob, expect).changes
                list(pool.map(lambda c: self.tensors[c.name].advance(c), changes.values()))
            # They are read again, and the memory of the values is used again, on other streams.
            list(
                pool.map(settle, {t.device for t in self.tensors.values() if t.device is not None})
            )

    def forget(self) -> None:
        for tensor in self.tensors.values():
            tensor.forget()


@dataclass(frozen=True, slots=True)
class Snapshot(BaseVersion):
    tensors: Mapping[str, SnapshotTensor]


class SnapshotCapture:
    """Bytes of a version that is being sent, which become a snapshot once it is committed.

    With `gave_up`, there was no room for all, so none is kept.
    """

    def __init__(self, tensors: Mapping[str, SnapshotTensor]) -> None:
        self._tensors = dict(tensors)
        self.gave_up = False

    def keep(self, name: str, offset: int, piece: memoryview) -> None:
        self._tensors[name].keep(offset, piece)

    @property
    def devices(self) -> set[torch.device]:
        return {t.device for t in self._tensors.values() if t.device is not None}

    def copies(self, name: str) -> bool:
        """Whether a tensor is copied on its device, whole, at its first bytes."""
        tensor = self._tensors.get(name)
        return tensor is not None and tensor.device is not None

    def whole(
        self, result: PushResult, run_id: str, digests: Mapping[str, bytes], size: int
    ) -> Snapshot | None:
        """Return the version that was committed; None if its bytes did not come by here."""
        # Whoever keeps the push, keeps us as well, and the next version may need the room.
        tensors, self._tensors = self._tensors, {}
        # Without a tensor nothing was sent: the version had been committed before.
        if not tensors or digests.keys() != tensors.keys():
            return None
        for name, tensor in tensors.items():
            tensor.seal(digests[name])
        signature = signature_of((n, tensors[n].dtype, tensors[n].shape) for n in sorted(tensors))
        return Snapshot(result.version, result.content_digest, size, signature, run_id, tensors)


class StreamingCapture(SnapshotCapture):
    """The same for tensors that come one after the other, those in `read` with their bytes."""

    def __init__(self, read: Mapping[str, SnapshotTensor]) -> None:
        super().__init__(read)
        self._read = frozenset(read)
        self._lock = threading.Lock()
        #: Bytes of memory that nobody has written to yet, so it still counts as free.
        self._blank = 0

    def add(self, tensors: Sequence[SourceTensor]) -> None:
        fresh = [tensor for tensor in tensors if tensor.name not in self._read]
        with self._lock:
            self._blank += sum(tensor.size for tensor in fresh)
            blank = self._blank
        self.gave_up = self.gave_up or not (room_for(blank) and self._made(fresh))
        if self.gave_up:
            self._tensors = {}

    def _made(self, tensors: Sequence[SourceTensor]) -> bool:
        from weightsync_client.snapshot.host_tensor import HostTensor

        try:
            self._tensors |= {tensor.name: HostTensor(tensor) for tensor in tensors}
        except MemoryError:
            return False
        return True

    def keep(self, name: str, offset: int, piece: memoryview) -> None:
        tensor = self._tensors.get(name)
        if tensor is not None and name not in self._read:
            tensor.keep(offset, piece)
            with self._lock:
                self._blank -= len(piece)


logger = logging.getLogger(__name__)

_TURN_S = 0.1


def _make(
    tensors: Iterable[SourceTensor], devices: frozenset[torch.device | None]
) -> dict[str, SnapshotTensor]:
    """Return memory for tensors: on those devices, else on the host; MemoryError: none there."""
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
    two versions, and where it needs the memory for what an iterable has given to a delta. Pushes
    that use the snapshot take turns, in the order in which they came.
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
        with self._changed:
            self._turns.remove(ticket)
            self._changed.notify_all()

    @contextlib.contextmanager
    def turn(self, ticket: object, stop: threading.Event) -> Iterator[None]:
        """Hold the snapshot, once those before have let go; AbortedError: `stop` was set."""
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

        `signature` is a digest of names, dtypes and shapes, or None if they are seen as tensors
        come. `run_id` is empty if there is none. Raises DeltaUnsuitable if there is no such
        version.
        """
        base = self.current
        if base is None:
            raise DeltaUnsuitable(
                Fallback.FIRST, "this client holds no version that it has committed"
            )
        if run_id and base.run_id and run_id != base.run_id:
            raise DeltaUnsuitable(
                Fallback.NEW_RUN, f"version {base.version} is of the run {base.run_id!r}"
            )
        if signature not in (None, base.signature):
            raise DeltaUnsuitable(
                Fallback.LAYOUT_CHANGED,
                f"names, dtypes or shapes differ from version {base.version}",
            )
        return base

    def take(self, tensors: Sequence[SourceTensor]) -> SnapshotCapture | None:
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
        """Return what keeps the bytes of a streamed push in full; `read` holds some already."""
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
        """Become the version that a delta of `base` has made, by the committed shards `blobs`."""
        self.current = None
        try:
            base.advance(blobs, threads)
        except Exception:
            # The version is committed all the same. The next push finds no base and is in full.
            logger.exception("the copy of version %d was dropped", base.version)
            return
        self.current = replace(
            base,
            version=result.version,
            content_digest=result.content_digest,
            run_id=run_id,
        )
