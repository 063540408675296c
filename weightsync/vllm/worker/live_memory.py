"""Finds out where the live parameters of a rank lie, and hands that over to who attaches."""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from weightsync.gpu.ipc import DeviceError, place_of
from weightsync.shm.live_views import DOCUMENT, GATE, HANDLES, MEMORY, LiveBox, LiveViews
from weightsync.shm.live_writers import LiveWriters
from weightsync.shm.segment_socket import SegmentClient
from weightsync.vllm.apply.prepared import RankPrepared
from weightsync.vllm.plan.live_boxes import placed_boxes
from weightsync.vllm.plan.load_plan import PlanRefusedError
from weightsync.vllm.plan.shared_params import shared_segments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from weightsync.gpu.ipc import Place
    from weightsync.shm.segment_socket import OfferedFile
    from weightsync.shm.segments import Segment
    from weightsync.vllm.apply.transform import Prepared

__all__ = ["LIVE_WRITERS", "ModelFacts", "facts_of", "hand_out", "open_block", "serve_attach"]

#: What an attach asks for: memory that can be read, or what is needed to write it in a block.
_READ, _WRITE = "read", "write"

#: Who has the memory of this worker.
LIVE_WRITERS = LiveWriters(shared_segments)

_LOADED = (
    "vLLM computes what is live of this model from its checkpoint, so that no view of it is a "
    "tensor of the checkpoint; push versions of it in place of attaching"
)
_PRIVATE = (
    "the parameters of this engine lie in private memory; start vLLM with WEIGHTSYNC_ATTACH=1, "
    "which puts them into memory that can be shared"
)
_UNSHARED = (
    "memory of a GPU can be shared unless it comes from sleep mode's allocator or PyTorch's "
    "expandable_segments; start vLLM without --enable-sleep-mode, and leave expandable_segments "
    "out of PYTORCH_CUDA_ALLOC_CONF"
)


class ModelFacts(NamedTuple):
    """What is told of the model to who attaches.

    Attributes:
        checkpoint: Name or path of what vLLM has loaded.
        config: As its `config.json` has it.
        refusal: Why nobody can attach, one sentence; "": one can.
    """

    checkpoint: str
    config: Mapping[str, Any]
    refusal: str = ""


def facts_of(worker: Any) -> ModelFacts:
    """Return those of a worker of vLLM's."""
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

    Args:
        args: With `holder`, a process is remembered that what was handed out is about to be given
            to; else there is an `offer`, which with `access` "write" is for one block.
        socket: The segment socket.
        about: `dp/pp/tp` of the rank, and what is told of the model.
        known: Returns what is live.

    Raises:
        PlanRefusedError: Nobody can attach to this model.
        LookupError: The server expects nothing any more.
    """
    offer, access, (rank, facts) = str(args["offer"]), str(args.get("access", "")), about
    if "holder" in args:
        LIVE_WRITERS.remember(args, socket)
    elif access == _WRITE:
        open_block(socket, offer, rank)
    else:
        hand_out(socket, offer, rank, facts, known(), access)
    return {"phase": "ready"}


def hand_out(
    socket: str, offer: str, rank: str, facts: ModelFacts, target: Prepared | None, access: str = ""
) -> None:
    """Send where the live parameters lie over the segment socket, and what opens their memory.

    Args:
        socket: The segment socket.
        offer: What the server expects.
        rank: `dp/pp/tp`.
        facts: Of the model.
        target: What is live.
        access: "read": memory of the host can be read only. "", of older releases: it can be
            written at any time.

    Raises:
        PlanRefusedError: Nobody can attach to this model.
        LookupError: The server expects nothing any more.
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
        document = stack.enter_context(_file(DOCUMENT, views.to_json()))
        files = [document, *stack.enter_context(memory.files(writable=access != _READ))]
        with SegmentClient(socket) as client:
            client.offer(f"{offer}/{rank}", files)


def open_block(socket: str, offer: str, rank: str) -> None:
    """Send what live parameters are written with in one block, and no longer.

    Args:
        socket: The segment socket.
        offer: What the server expects.
        rank: `dp/pp/tp`.

    Raises:
        LookupError: The server expects nothing any more.
    """
    gate = LIVE_WRITERS.gate()
    try:
        with (
            _HostMemory(shared_segments()).files(writable=True) as files,
            SegmentClient(socket) as client,
        ):
            client.offer(f"{offer}/{rank}", [(GATE, 0, gate), *files])
    finally:
        os.close(gate)


class _Memory(Protocol):
    """Allocations that live parameters lie in."""

    device: bytes

    def locate(self, address: int) -> tuple[int, int]:
        """Return in which allocation an address is, and where there, bytes."""

    def files(self, *, writable: bool) -> contextlib.AbstractContextManager[Sequence[OfferedFile]]:
        """Lend what opens those that `locate` has found; of a GPU always for writing."""


def _memory(live: Sequence[torch.Tensor]) -> _Memory:
    devices = {view.device for view in live if view.is_cuda}
    if not devices:
        return _HostMemory(shared_segments())
    # The driver wants a context of this thread's, and PyTorch makes none before it has to.
    torch.cuda.current_stream(devices.pop()).synchronize()
    return _DeviceMemory()


class _HostMemory:
    """Segments of this process.

    Args:
        segments: All of them.
    """

    device = b""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments

    def locate(self, address: int) -> tuple[int, int]:
        """See `_Memory`.

        Raises:
            PlanRefusedError: It is in none.
        """
        for index, segment in enumerate(self._segments):
            if 0 <= address - segment.address < segment.capacity:
                return index, address - segment.address
        raise PlanRefusedError(_PRIVATE)

    @contextlib.contextmanager
    def files(self, *, writable: bool) -> Iterator[Sequence[OfferedFile]]:
        """See `_Memory`."""
        with contextlib.ExitStack() as stack:
            files: list[OfferedFile] = []
            for segment in self._segments:
                # Opened anew: the kernel then knows who may still write.
                fd = segment.lend() if writable else segment.read_only_fd()
                stack.callback(os.close, fd)
                files.append((MEMORY, segment.capacity, fd))
            yield files


class _DeviceMemory:
    """Allocations on the rank's GPU; the calling thread is at work on it."""

    def __init__(self) -> None:
        self.device = b""
        self._known: dict[int, Place] = {}
        self._handles: dict[bytes, int] = {}

    def locate(self, address: int) -> tuple[int, int]:
        """See `_Memory`.

        Raises:
            PlanRefusedError: It cannot be shared.
        """
        try:
            place = place_of(address, self._known)
        except DeviceError as error:
            raise PlanRefusedError(f"{_UNSHARED} ({error})") from error
        self.device = place.uuid
        return self._handles.setdefault(place.handle, len(self._handles)), place.offset

    @contextlib.contextmanager
    def files(self, *, writable: bool) -> Iterator[Sequence[OfferedFile]]:
        """See `_Memory`."""
        del writable
        with _file(HANDLES, b"".join(self._handles)) as file:
            yield [file]


@contextlib.contextmanager
def _file(name: str, data: bytes) -> Iterator[OfferedFile]:
    """Lend a file that lies nowhere."""
    fd = os.memfd_create("weightsync", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        yield name, len(data), fd
    finally:
        os.close(fd)
