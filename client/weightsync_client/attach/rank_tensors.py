"""The memory that a rank handed out, as tensors of PyTorch."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from weightsync.errors import Reason
from weightsync.gpu.ipc import DeviceError, device_of
from weightsync.model.dtypes import torch_dtype
from weightsync_client.errors import refuse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightsync.shm.attach_client import RankMemory
    from weightsync.shm.live_views import LiveBox

__all__ = ["open_memory", "view_of_box"]


def open_memory(rank: RankMemory, stack: contextlib.ExitStack) -> list[torch.Tensor]:
    """Return each allocation of a rank as bytes; those of a GPU stay open until the stack ends.

    Raises:
        ClientError: This process does not see the rank's GPU.
    """
    if not rank.views.device:
        return [torch.frombuffer(mapping.view, dtype=torch.uint8) for mapping in rank.mappings]
    try:
        device = device_of(rank.views.device)
        # Each is opened once in this process: what shares it is a view.
        spans = [stack.enter_context(device.opened(handle)) for handle in rank.handles]
    except DeviceError as error:
        raise refuse(
            Reason.ENGINE_REFUSED,
            f"the GPU of rank {rank.views.rank} cannot be reached from here ({error}); run the "
            "trainer where vLLM's GPUs are visible, and in a container that shares vLLM's process "
            "namespace",
        ) from error
    where = f"cuda:{device.ordinal}"
    return [torch.as_tensor(_DeviceBytes(*span), device=where) for span in spans]


class _DeviceBytes:
    """Memory of a GPU as PyTorch takes it without a copy.

    Args:
        address: Of the first byte.
        size: Bytes.
    """

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def view_of_box(box: LiveBox, memory: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what lies in a box, without a copy.

    Args:
        box: The box.
        memory: Allocations of its rank.

    Raises:
        ClientError: It is not within them, or of a dtype that this PyTorch has not.
    """
    dtype = torch_dtype(box.dtype)
    if dtype is None:
        raise refuse(
            Reason.NOT_SUPPORTED,
            f"{box.tensor} is {box.dtype}, which this PyTorch has not; install a newer one",
        )
    steps = zip(box.lengths, box.stride, strict=True)
    last = sum((length - 1) * step for length, step in steps)
    end = box.begin + (last + 1) * dtype.itemsize
    if box.memory >= len(memory) or end > memory[box.memory].numel():
        raise refuse(
            Reason.FAULT,
            f"{box.tensor} is said to lie outside of what was handed out; install the same "
            "weightsync release on both sides",
        )
    whole = memory[box.memory][box.begin : end].view(dtype)
    return whole.as_strided(box.lengths, box.stride)
