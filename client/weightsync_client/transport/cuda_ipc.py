"""Shards on a GPU that the server on this host copies by itself, while this process holds them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from weightsync.gpu.ipc import DeviceError, Place, place_of
from weightsync.model.digest import DIGEST_BYTES
from weightsync.shm.same_host import MOST_PLACES, IpcPlacement, SameHostClient
from weightsync_client.source.slice_shards import SliceShard
from weightsync_client.source.tensors import Scratch, settle

if TYPE_CHECKING:
    import torch

    from weightsync_client.source.shards import ByteSink, Shard
    from weightsync_client.source.tensors import SourceTensor


#: Shards that are told one by one before all others are: the server is at work on them meanwhile.
_FIRST = 3
_UNSHARED = (
    "memory of a GPU can be shared unless it is PyTorch's expandable_segments; leave "
    "expandable_segments out of PYTORCH_CUDA_ALLOC_CONF"
)


class CudaIpcTransport:
    """The shards of one push that the server copies: `begin`, `finish` and, always, `release`.

    Only tensors that `sink` copies itself can go this way. An error has ended the connection.
    """

    def __init__(self, tensors: Mapping[str, SourceTensor], sink: ByteSink | None) -> None:
        self._tensors = tensors
        self._sink = sink
        self._begun: list[Shard] = []
        #: Where shards lie of which that was found out ahead, by index.
        self._known: dict[int, IpcPlacement | None] = {}
        #: Shards that the server could copy if their tensors lay on one GPU.
        self.mixed = 0
        #: Why the server could not copy others, a clause; empty: there were none.
        self.refusal = ""
        #: Memory that must stay as it is,
        self._in_use: list[torch.Tensor] = []
        #: and where its allocations lie.
        self._allocations: dict[int, Place] = {}

    def begin(
        self, client: SameHostClient, shards: Iterable[Shard], stop: threading.Event
    ) -> list[Shard]:
        left: list[Shard] = []
        declined, waiting = False, list(shards)
        for number, shard in enumerate(waiting):
            if len(self._begun) == _FIRST and not self._known and not isinstance(shard, SliceShard):
                # No engine copies from a process that has parts of tensors.
                self._announce(client, waiting[number:])
            where = None if declined or stop.is_set() else self._placed(shard)
            if where is None:
                left.append(shard)
            elif refusal := client.collect(shard.index, where):
                declined, self.refusal = True, refusal
                left.append(shard)
            else:
                self._begun.append(shard)
        for shard in self._begun:
            self._keep(shard)
        return left

    def finish(self, client: SameHostClient, then: Callable[[Shard, list[bytes]], None]) -> None:
        """Return once every shard was copied; `then` gets each, and its tensors' digests."""
        for shard in self._begun:
            joined = client.collected(shard.index)
            starts = range(0, len(joined), DIGEST_BYTES)
            then(shard, [joined[at : at + DIGEST_BYTES] for at in starts])

    def release(self) -> None:
        """Hold no memory any more: all was copied, or the connection has ended."""
        self._allocations.clear()
        self._in_use.clear()

    def _announce(self, client: SameHostClient, shards: Iterable[Shard]) -> None:
        self._known = {shard.index: self._found(shard) for shard in shards}
        batch: dict[int, IpcPlacement] = {}
        places = 0
        for index, where in self._known.items():
            if where is None:
                continue
            batch[index] = where
            places += len(where.places)
            if places >= MOST_PLACES:
                client.announce_ipc(batch)
                batch, places = {}, 0
        client.announce_ipc(batch)

    def _placed(self, shard: Shard) -> IpcPlacement | None:
        return self._known[shard.index] if shard.index in self._known else self._found(shard)

    def _found(self, shard: Shard) -> IpcPlacement | None:
        """Return where a shard lies; None: not on one GPU, or not where the server can reach it."""
        tensors = [self._tensors.get(entry.name) for entry in shard.tensors]
        filled = [tensor for tensor in tensors if tensor is not None and tensor.size]
        if None in tensors or not filled or len(filled) > MOST_PLACES:
            return None
        if not all(map(self._fits, filled)):
            return None
        devices = {tensor.device for tensor in filled if tensor.device is not None}
        if len(devices) > 1:
            self.mixed += 1
            return None
        (device,) = devices
        try:
            flats = [tensor.flat() for tensor in filled if tensor.flat is not None]
            settle(device)
            places = [place_of(flat.data_ptr(), self._allocations) for flat in flats]
        except DeviceError as error:
            self.refusal = f"{error}: {_UNSHARED}"
            return None
        except Exception:  # noqa: BLE001 - who writes it meets that again, and names the tensor
            return None
        self._in_use += flats
        handles = list(dict.fromkeys(place.handle for place in places))
        numbers = {handle: number for number, handle in enumerate(handles)}
        offsets = [(numbers[place.handle], place.offset) for place in places]
        replicas = b"".join(shard.all_digests([])) if isinstance(shard, SliceShard) else b""
        own = replicas, self._sink is not None
        return IpcPlacement(places[0].uuid, _header(shard), handles, offsets, *own)

    def _fits(self, tensor: SourceTensor) -> bool:
        # What must be gathered first would take as much of the GPU again.
        there = tensor.device is not None and tensor.device.type == "cuda" and tensor.in_place
        return there and (self._sink is None or self._sink.copies(tensor.name))

    def _keep(self, shard: Shard) -> None:
        if self._sink is not None:
            for entry in shard.tensors:
                self._sink.keep(entry.name, 0, memoryview(b""))


def _header(shard: Shard) -> bytes:
    with contextlib.closing(shard.open(Scratch())) as reader:
        return b"".join(reader.read(0, shard.entry.data_start))
