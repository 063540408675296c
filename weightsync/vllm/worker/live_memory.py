"""Finds out where the live parameters of a rank lie, and hands that over to who attaches."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from weightsync.gpu.ipc import DeviceError, Place, place_of
from weightsync.shm.live_views import DOCUMENT, HANDLES, LiveBox, LiveViews
from weightsync.shm.live_writers import LiveWriters
from weightsync.shm.segment_socket import OfferedFile, SegmentClient, file_of
from weightsync.vllm.apply.device_ops import RankPrepared
from weightsync.vllm.apply.transform import Prepared
from weightsync.vllm.plan.load_plan import LoadPlan, PlanRefusedError, Slice, row_major
from weightsync.vllm.plan.load_watch import shared_segments


@dataclass(frozen=True, slots=True)
class PlacedBox:
    """A box of a tensor and its slice, in elements; `stride` is between those of the parameter."""

    tensor: str
    index: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    stride: tuple[int, ...]


def placed_boxes(plan: LoadPlan) -> tuple[PlacedBox, ...]:
    """Return every box that is live, also of tensors that repeat another one, as tied heads do.

    What a copy reads is a view with any dimensions, once `merge_neighbours` joined what loaders
    cut; here it is put into those of its tensor again.

    Raises PlanRefusedError with the tensors of which a copy is no box.
    """
    boxes: list[PlacedBox] = []
    others: list[str] = []
    for index, item in enumerate(plan.slices):
        if not item.source.numel:
            continue
        box = _placed_box(index, item, plan.tensors[item.tensor][1])
        if box is None:
            others.append(item.tensor)
        else:
            boxes.append(box)
    if others:
        msg = (
            "push versions of this model instead of attaching: vLLM spreads these tensors over "
            "its parameters in steps, so no view of them is a tensor of the checkpoint"
        )
        raise PlanRefusedError(msg, sorted(set(others)))
    return (*boxes, *_repeated(plan, boxes))


def _repeated(plan: LoadPlan, boxes: Sequence[PlacedBox]) -> Iterator[PlacedBox]:
    for name, same in plan.same_as.items():
        for box in boxes:
            if box.tensor == same and name not in plan.loaded:
                yield PlacedBox(name, box.index, box.offsets, box.lengths, box.stride)


def _placed_box(index: int, item: Slice, shape: Sequence[int]) -> PlacedBox | None:
    box = _GrowingBox.at(item.source.offset, shape)
    steps = zip(item.source.shape, item.source.stride, item.target.stride, strict=True)
    if not all(length == 1 or box.spread(length, *strides) for length, *strides in steps):
        return None
    return PlacedBox(item.tensor, index, box.offsets, tuple(box.lengths), tuple(box.stride))


@dataclass
class _GrowingBox:
    """A box as far as it is known, in elements; `stride` is between those of the parameter."""

    shape: Sequence[int]
    dense: Sequence[int]
    offsets: tuple[int, ...]
    lengths: list[int]
    stride: list[int]

    @classmethod
    def at(cls, offset: int, shape: Sequence[int]) -> _GrowingBox:
        dense = row_major(0, shape).stride
        offsets = []
        for step in dense:
            offsets.append(offset // step)
            offset %= step
        return cls(shape, dense, tuple(offsets), [1] * len(shape), [0] * len(shape))

    def spread(self, length: int, source: int, target: int) -> bool:
        """Put a dimension into those of the tensor, from the inner one outwards, if it is of a box.

        Returns whether it is. `source` is its stride in the tensor, `target` that in the parameter.
        """
        wide = [axis for axis, size in enumerate(self.shape) if size > 1]
        inner = [axis for axis in wide if self.dense[axis] == source]
        for axis in reversed([axis for axis in wide if inner and axis <= inner[0]]):
            if self.lengths[axis] > 1:
                return False
            self.stride[axis] = target
            if length <= self.shape[axis] - self.offsets[axis]:
                self.lengths[axis] = length
                return True
            if self.offsets[axis] or length % self.shape[axis]:
                return False
            self.lengths[axis] = self.shape[axis]
            length, target = length // self.shape[axis], target * self.shape[axis]
        return False


#: What an attach asks for: memory that can be read, or what is needed to write it in a block.
_READ, _WRITE = "read", "write"

#: Who has the memory of this worker.
LIVE_WRITERS = LiveWriters(shared_segments)

_LOADED = (
    "push versions of this model instead of attaching: vLLM computes its live weights from the "
    "checkpoint, so no view of them is a tensor of the checkpoint"
)
_PRIVATE = (
    "start vLLM with WEIGHTSYNC_ATTACH=1, which puts parameters into memory that can be shared: "
    "this engine's are in private memory"
)
_UNSHARED = (
    "memory of a GPU can be shared unless it was allocated by sleep mode or PyTorch's "
    "expandable_segments; start vLLM without --enable-sleep-mode, and leave expandable_segments "
    "out of PYTORCH_CUDA_ALLOC_CONF"
)


class ModelFacts(NamedTuple):
    """What a trainer that attaches is told of the model.

    `checkpoint` is the name or path that vLLM has loaded, and `config` is as in `config.json`.
    `refusal` says why no trainer can attach; "" if one can.
    """

    checkpoint: str
    config: Mapping[str, Any]
    refusal: str = ""


def facts_of(worker: Any) -> ModelFacts:
    model = worker.vllm_config.model_config
    config = json.loads(model.hf_config.to_json_string(use_diff=False))
    asleep = bool(getattr(model, "enable_sleep_mode", False))
    return ModelFacts(str(model.model), config, _UNSHARED if asleep else "")


def serve_attach(
    args: Mapping[str, Any],
    socket: str,
    about: tuple[str, ModelFacts],
    known: Callable[[], Prepared],
) -> dict[str, Any]:
    """Do what a rank is asked for by `weightsync_attach`; return its report.

    With `holder` in `args`, the process is remembered to which the memory is about to be given;
    else there is an `offer`, which with `access` "write" is for one block. Raises PlanRefusedError
    if nobody can attach, LookupError if the server expects nothing any more.
    """
    offer, access, (rank, facts) = str(args["offer"]), str(args.get("access", "")), about
    if "holder" in args:
        LIVE_WRITERS.remember(args, socket)
    elif access == _WRITE:
        LIVE_WRITERS.open_block(socket, f"{offer}/{rank}")
    else:
        hand_out(socket, offer, rank, facts, known(), access)
    return {"phase": "ready"}


def hand_out(
    socket: str, offer: str, rank: str, facts: ModelFacts, target: Prepared | None, access: str = ""
) -> None:
    """Send where the live parameters, `target`, lie over the segment socket, and what opens them.

    With `access` "read" memory of the host can be read only; with "", of older releases, it can be
    written at any time. Raises as `serve_attach`.
    """
    if facts.refusal:
        raise PlanRefusedError(facts.refusal)
    if not isinstance(target, RankPrepared):
        raise PlanRefusedError(_LOADED)
    parts = placed_boxes(target.plan)
    live = target.targets.views()
    memory = _memory(live)
    boxes = []
    for part in parts:
        item = target.plan.slices[part.index]
        boxes.append(
            LiveBox(
                part.tensor,
                target.plan.param_dtypes[item.param],
                *target.plan.tensors[part.tensor],
                part.offsets,
                part.lengths,
                part.stride,
                *memory.locate(live[part.index].data_ptr()),
            )
        )
    views = LiveViews(rank, memory.device, facts.checkpoint, facts.config, tuple(boxes))
    with contextlib.ExitStack() as stack:
        document = stack.enter_context(file_of(DOCUMENT, views.to_json()))
        files = [document, *stack.enter_context(memory.files(writable=access != _READ))]
        with SegmentClient(socket) as client:
            client.offer(f"{offer}/{rank}", files)


class _Memory(Protocol):
    device: bytes

    def locate(self, address: int) -> tuple[int, int]:
        """Return in which allocation an address is, and where there, bytes."""

    def files(self, *, writable: bool) -> contextlib.AbstractContextManager[Sequence[OfferedFile]]:
        """Lend what opens those that `locate` has found; of a GPU always for writing."""


def _memory(live: Sequence[torch.Tensor]) -> _Memory:
    devices = {view.device for view in live if view.is_cuda}
    if not devices:
        return _HostMemory()
    # The driver wants a context of this thread's, and PyTorch makes none before it has to.
    torch.cuda.current_stream(devices.pop()).synchronize()
    return _DeviceMemory()


class _HostMemory:
    device = b""

    def locate(self, address: int) -> tuple[int, int]:
        for index, segment in enumerate(shared_segments()):
            if 0 <= address - segment.address < segment.capacity:
                return index, address - segment.address
        raise PlanRefusedError(_PRIVATE)

    def files(self, *, writable: bool) -> contextlib.AbstractContextManager[Sequence[OfferedFile]]:
        return LIVE_WRITERS.files(writable=writable)


class _DeviceMemory:
    """Allocations on the rank's GPU; the calling thread is at work on it."""

    def __init__(self) -> None:
        self.device = b""
        self._known: dict[int, Place] = {}
        self._handles: dict[bytes, int] = {}

    def locate(self, address: int) -> tuple[int, int]:
        try:
            place = place_of(address, self._known)
        except DeviceError as error:
            raise PlanRefusedError(f"{_UNSHARED} ({error})") from error
        self.device = place.uuid
        return self._handles.setdefault(place.handle, len(self._handles)), place.offset

    @contextlib.contextmanager
    def files(self, *, writable: bool) -> Iterator[Sequence[OfferedFile]]:
        del writable
        with file_of(HANDLES, b"".join(self._handles)) as file:
            yield [file]
