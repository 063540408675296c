"""Digests of many tensors of a rank, beside generation."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from weightsync.gpu.device_digest import Digests, digestible
from weightsync.vllm.plan.int_views import StoppedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from weightsync.gpu.device_kernels import Kernels
    from weightsync.vllm.cuda.uploader import StreamThrottle

__all__ = ["digests_of"]

_Key = TypeVar("_Key", int, str)
#: Tensors that are digested at a time where that is not urgent: more would leave nothing of the
#: device to others.
_AT_ONCE = 16


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
    known = [key for key, tensor in tensors.items() if digestible(tensor)]
    if kernels is None or not known:
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
