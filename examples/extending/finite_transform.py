"""A transform that keeps NaN and infinity out of what is served, and leaves the rest to another.

It looks at the bytes of a version while the engine generates, and refuses it by the names of its
tensors before any live byte is written; of fp8 it knows nothing. What writes and what proves is the
other transform's: the live bytes are proved to be those of the version, as ever.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from weightsync.vllm.apply.device_ops import Stop
from weightsync.vllm.apply.segment_mappings import SegmentMappings
from weightsync.vllm.apply.transform import Prepared, TransformRequest, VersionTransform
from weightsync.vllm.plan.int_views import StoppedError
from weightsync.vllm.plan.load_plan import PlanRefusedError
from weightsync.vllm.plan.staged_tensors import StagedTensors

if TYPE_CHECKING:
    from weightsync.vllm.apply.writes import ParamWriter

logger = logging.getLogger(__name__)

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class FiniteTransform:
    """See `VersionTransform`. Does what `inner` does, for versions that are finite."""

    def __init__(self, inner: VersionTransform) -> None:
        self._inner = inner

    @property
    def name(self) -> str:
        return self._inner.name

    def prepare(self, request: TransformRequest, stop: Stop) -> tuple[Prepared, Mapping[str, Any]]:
        begin = time.perf_counter()
        if wrong := _not_finite(request, stop):
            cause = f"{len(wrong)} tensors hold NaN or infinity, first {wrong[0]}"
            raise PlanRefusedError(cause, wrong, "push a version whose values are finite")
        logger.info("looked through %s in %.2f s", request.apply_id, time.perf_counter() - begin)
        return self._inner.prepare(request, stop)

    def writer(self, target: Prepared, live: str) -> ParamWriter:
        return self._inner.writer(target, live)

    def invalidate(self, target: Prepared) -> None:
        self._inner.invalidate(target)

    def compare(self, target: Prepared, stop: Stop) -> list[str]:
        return self._inner.compare(target, stop)


def _not_finite(request: TransformRequest, stop: Stop) -> list[str]:
    """Return the names of tensors that are not finite; the segments stay mapped for as long."""
    staged, mappings = request.staged, SegmentMappings()
    views = mappings.map(request.socket, staged.segments)
    try:
        tensors = StagedTensors(staged.manifest.layout, views)
        wrong = []
        for entry in staged.manifest.layout.tensors:
            if stop():
                raise StoppedError
            tensor = tensors.tensor(entry.name)
            if tensor.dtype in _FLOATS and not bool(torch.isfinite(tensor).all()):
                wrong.append(entry.name)
            del tensor
        del tensors
        return wrong
    finally:
        mappings.unmap(staged.segments)
