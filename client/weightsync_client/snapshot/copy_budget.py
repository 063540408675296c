"""Where there is room for a copy of the model: checked before anything is taken."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from weightsync.free_memory import available_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from weightsync_client.source.tensors import SourceTensor

__all__ = ["room_for", "roomy"]

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
    """Return the devices with room for a copy of their tensors, and whether the host has the rest.

    On a device the copy costs none of the host's memory, and it is compared there.
    """
    sizes: Counter[torch.device | None] = Counter()
    for tensor in tensors:
        sizes[tensor.device] += tensor.size
    devices = {d for d, size in sizes.items() if d is not None and _device_room_for(d, size)}
    rest = sum(size for device, size in sizes.items() if device not in devices)
    return frozenset(devices), rest == 0 or room_for(rest)
