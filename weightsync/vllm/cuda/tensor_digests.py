"""Digests of many tensors of a rank, beside generation."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, TypeVar

import torch

from weightsync.gpu.device_digest import Digests, digestible
from weightsync.vllm.plan.int_views import StoppedError, tensor_digest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from weightsync.gpu.device_kernels import Kernels
    from weightsync.vllm.cuda.uploader import StreamThrottle

__all__ = ["digests_of", "small_digests"]

_Key = TypeVar("_Key", int, str)
#: Tensors that are digested at a time where that is not urgent: more would leave nothing of the
#: device to others.
_AT_ONCE = 16
#: Bytes of a tensor below which its way to the host costs more than its digest.
_SMALL = 1 << 10


def digests_of(
    kernels: Kernels | None,
    tensors: Mapping[_Key, torch.Tensor],
    pace: StreamThrottle | None = None,
    stop: Callable[[], bool] = bool,
) -> dict[_Key, bytes]:
    """Return the digests of tensors by their keys, but for those that are not `digestible`.

    Args:
        kernels: Of their device; None: it digests nothing.
        tensors: Any.
        pace: Of the current stream: some are digested at a time; None: all at once.
        stop: Asked now and then; True raises `StoppedError`.
    """
    if kernels is None:
        return {}
    # A kernel reads no memory of another kind than its device's.
    kind = kernels.device.type
    known = [key for key, t in tensors.items() if t.device.type == kind and digestible(t)]
    if not known:
        return {}
    # The longest first, and those beside each other that take as long.
    known.sort(key=lambda key: -tensors[key].nbytes)
    digests = Digests(kernels, [tensors[key] for key in known])
    step = _AT_ONCE if pace is not None else len(known)
    for begin in range(0, len(known), step):
        if stop():
            raise StoppedError
        digests.queue(begin, min(begin + step, len(known)))
        if pace is not None:
            pace.step()
    return dict(zip(known, digests.results(), strict=True))


def small_digests(tensors: Mapping[_Key, torch.Tensor]) -> dict[_Key, bytes]:
    """Return the digests of those of some tensors that are small; a device sends all at once.

    Args:
        tensors: Any.
    """
    found: dict[_Key, bytes] = {}
    places: defaultdict[torch.device, dict[_Key, torch.Tensor]] = defaultdict(dict)
    for key, tensor in tensors.items():
        if tensor.numel() and tensor.nbytes <= _SMALL:
            places[tensor.device][key] = tensor.contiguous().reshape(-1).view(torch.uint8)
    for small in places.values():
        sizes = [tensor.numel() for tensor in small.values()]
        parts = torch.split(torch.cat(list(small.values())).cpu(), sizes)
        found |= {key: tensor_digest_of(part) for key, part in zip(small, parts, strict=True)}
    return found
