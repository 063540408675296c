"""The parameters of a rank on a CPU in shared memory, so that who attaches can map them.

They are moved when vLLM has loaded a model and before anything keeps an address of them: before
load plans are captured, and before the model is compiled or has run. Whatever shares memory with a
parameter moves with it, so that tied tensors stay tied. What kernels have packed is a copy, which
stays where it is: no plan covers it, and such a model is refused when somebody attaches.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch

from weightsync.shm.segments import Segment
from weightsync.vllm.plan.forward_tensors import forward_tensors
from weightsync.vllm.plan.load_watch import is_watching

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["move_parameters", "share_loaded", "shared_segments"]

logger = logging.getLogger(__name__)

#: Where each storage begins, bytes: kernels read whole cache lines.
_ALIGNMENT = 64
#: One of each model that was loaded; they stay as long as the process.
_segments: list[Segment] = []


def shared_segments() -> tuple[Segment, ...]:
    """Return what parameters lie in; empty: nobody asked for it."""
    return tuple(_segments)


def share_loaded(loaders: Any) -> None:
    """Move the parameters of every model when it was loaded. Repeating it is harmless.

    Args:
        loaders: vLLM's module `model_executor.model_loader.base_loader`.
    """
    load = loaders.BaseModelLoader.load_model
    if hasattr(load, "_weightsync_shared"):
        return

    @functools.wraps(load)
    def load_model(*args: Any, **kwargs: Any) -> Any:
        model = load(*args, **kwargs)
        if is_watching():
            move_parameters(model)
        return model

    load_model._weightsync_shared = True  # type: ignore[attr-defined]  # noqa: SLF001 - our mark
    loaders.BaseModelLoader.load_model = load_model


def move_parameters(model: torch.nn.Module) -> None:
    """Put the parameters and buffers of a model into one segment; what they hold stays.

    Raises:
        WeightSyncError: MEMORY_EXHAUSTED when the host has not got the memory.
    """
    groups = _by_storage(model)
    sizes = [-(-group[0].untyped_storage().nbytes() // _ALIGNMENT) * _ALIGNMENT for group in groups]
    if not groups:
        return
    segment = Segment.create(sum(sizes))
    at = 0
    for group, size in zip(groups, sizes, strict=True):
        _move(group, segment, at)
        at += size
    _segments.append(segment)
    logger.info("weightsync: %d bytes of parameters lie in shared memory", at)


def _by_storage(model: torch.nn.Module) -> list[list[torch.Tensor]]:
    """Return the tensors that lie in memory of parameters and buffers, by that memory.

    What a draft has of its target has been moved with that.
    """
    owned = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
    moved = {0, *(place for place in owned if any(_has_address(s, place) for s in _segments))}
    groups: dict[int, list[torch.Tensor]] = {address: [] for address in owned - moved}
    for tensor in _distinct(tensor for _, tensor in forward_tensors(model)):
        if (address := _storage(tensor)) in groups:
            groups[address].append(tensor)
    return [group for group in groups.values() if group]


def _distinct(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    seen: set[int] = set()
    for tensor in tensors:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor


def _storage(tensor: torch.Tensor) -> int:
    """Return where the memory of a tensor begins; 0: it has none of this host."""
    there = tensor.layout is torch.strided and tensor.device.type == "cpu"
    return tensor.untyped_storage().data_ptr() if there else 0


def _has_address(segment: Segment, address: int) -> bool:
    return 0 <= address - segment.address < segment.capacity


def _move(group: Iterable[torch.Tensor], segment: Segment, at: int) -> None:
    first, *_ = tensors = list(group)
    old = first.untyped_storage()
    # A storage of its own: compilers ask whether inputs share one.
    place = torch.frombuffer(segment.view, dtype=torch.uint8, count=old.nbytes(), offset=at)
    place.copy_(torch.empty(0, dtype=torch.uint8).set_(old))
    for tensor in tensors:
        view = torch.empty(0, dtype=tensor.dtype)
        view.set_(place.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        tensor.data = view
