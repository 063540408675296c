"""A worker extension for tests: commits faults inside vLLM's workers when a file tells it to.

Given by --worker-extension-cls, which our own methods leave free. The file named by
WEIGHTSYNC_TEST_FAULT holds one JSON object and is removed when the fault has been committed:
{"flip": PARAMETER}: flips one bit of the live parameter before it is verified;
{"skip": PARAMETER}: does not write that parameter's slices, or what changes of it;
{"stall": SECONDS}: the commit takes that much longer.

Where WEIGHTSYNC_TEST_RANK is set to `dp/pp/tp`, only the rank of that name comes by the failpoints
`worker.*`: else all ranks would, and fail alike.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from weightsync import failpoints
from weightsync.vllm.apply import host_ops, host_patch
from weightsync.vllm.worker import worker_methods
from weightsync.vllm.worker_protocol import rank_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from weightsync.vllm.apply.device_ops import RankPrepared
    from weightsync.vllm.apply.parallel import SliceThreads
    from weightsync.vllm.plan.live_params import Targets

__all__ = ["FaultExtension"]

_write = host_ops.HostWriter.write
_mismatched = host_ops.ExpectedDigests.mismatched
_patch_write = host_patch.HostPatch.write
_patch_verify = host_patch.HostPatch.verify


def _take(kind: str) -> Any:
    path = Path(os.environ["WEIGHTSYNC_TEST_FAULT"])
    if not path.exists():
        return None
    order = json.loads(path.read_text())
    if kind not in order:
        return None
    path.unlink(missing_ok=True)
    return order[kind]


def _faulty_write(self: host_ops.HostWriter, threads: SliceThreads) -> None:
    time.sleep(_take("stall") or 0)
    name = _take("skip")
    if name is None:
        _write(self, threads)
        return
    target = self.target
    places = zip(target.plan.slices, target.targets.views(), target.sources, strict=True)
    for item, place, source in places:
        if item.param != name:
            place.copy_(source)


def _faulty_mismatched(
    self: host_ops.ExpectedDigests,
    target: RankPrepared,
    threads: SliceThreads,
    stop: Callable[[], bool] = bool,
    found: Mapping[int, bytes] = MappingProxyType({}),
) -> list[str]:
    _flip(target.targets)
    return _mismatched(self, target, threads, stop, found)


def _faulty_patch_write(self: host_patch.HostPatch, threads: SliceThreads) -> None:
    time.sleep(_take("stall") or 0)
    name = _take("skip")
    changes = [change for change in self.changes if change.param != name]
    _patch_write(host_patch.HostPatch(self.base, self.targets, changes, self.copies), threads)


def _faulty_patch_verify(self: host_patch.HostPatch, threads: SliceThreads) -> list[str]:
    _flip(self.targets)
    return _patch_verify(self, threads)


def _flip(targets: Targets) -> None:
    name = _take("flip")
    if name is not None:
        targets.views()
        words = targets.memory(name).view(torch.uint8)
        words[len(words) // 2] ^= 1


host_ops.HostWriter.write = _faulty_write  # type: ignore[method-assign]
host_ops.ExpectedDigests.mismatched = _faulty_mismatched  # type: ignore[method-assign]
host_patch.HostPatch.write = _faulty_patch_write  # type: ignore[method-assign]
host_patch.HostPatch.verify = _faulty_patch_verify  # type: ignore[method-assign]


_hit, _lie = failpoints.hit, failpoints.lie
#: What this rank calls itself, as soon as it was called.
_own: set[str] = set()


def _noted_name(parallel: Any, rank: int) -> str:
    name = rank_name(parallel, rank)
    _own.add(name)
    return name


def _meant(point: str) -> bool:
    rank = os.environ.get("WEIGHTSYNC_TEST_RANK", "")
    return not rank or not point.startswith("worker.") or rank in _own


def _hit_on_one(name: str) -> None:
    if _meant(name):
        _hit(name)


def _lie_on_one(name: str) -> str | None:
    return _lie(name) if _meant(name) else None


failpoints.hit, failpoints.lie = _hit_on_one, _lie_on_one
setattr(worker_methods, "rank_name", _noted_name)  # noqa: B010 - it is not exported


class FaultExtension:
    """Its import is all that it does, and one method proves that extensions are still reachable."""

    def tests_extension_method(self) -> str:
        """Return something."""
        return "reached"
