"""Views of segments and of live parameters, made once for all versions that lie in the same places.

A model has hundreds, and who makes them keeps the interpreter from the thread that generates.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from weightsync.vllm.plan.live_params import Targets
from weightsync.vllm.plan.staged_tensors import StagedTensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from weightsync.model.manifest import Layout
    from weightsync.vllm.plan.live_params import LiveParameters
    from weightsync.vllm.plan.load_plan import LoadPlan

__all__ = ["Read", "ViewCache"]

#: Versions in segments of their own whose views are kept; a server has two or three slots.
_MOST = 4


class Read(NamedTuple):
    """What a plan reads.

    Attributes:
        sources: A view of shared memory per slice.
        turns: Place of the slice's shard in the order in which shards are read.
        copied: A tensor lay at an odd address, so that its view is of a copy.
    """

    sources: list[torch.Tensor]
    turns: list[int]
    copied: bool = False


class ViewCache:
    """The views of one rank. Callers see to it that they come one at a time.

    Args:
        live: The live parameters.
    """

    def __init__(self, live: LiveParameters) -> None:
        self._live = live
        self._targets: dict[str, Targets] = {}
        self._read: OrderedDict[tuple[tuple[str, ...], str, str], Read] = OrderedDict()

    def targets(self, plan: LoadPlan) -> Targets:
        """Return the live destinations of a plan's slices, where they are now.

        Raises:
            ParameterChangedError: A parameter is gone.
        """
        now = Targets(self._live, plan.slices)
        known = self._targets.get(plan.signature)
        if known is not None and known.geometry == now.geometry:
            return known
        self._targets[plan.signature] = now
        return now

    def read(
        self,
        layout: Layout,
        ids: tuple[str, ...],
        plan: LoadPlan,
        segments: Sequence[memoryview],
    ) -> Read:
        """Return what a plan reads of a version. Reads no bytes.

        Args:
            layout: Of the version.
            ids: Names of its segments.
            plan: Of its layout.
            segments: The bytes of each shard's segment.

        Raises:
            ValueError: A segment is smaller than its shard.
        """
        key = ids, layout.digest, plan.signature
        if key in self._read:
            self._read.move_to_end(key)
            return self._read[key]
        sources = StagedTensors(layout, segments)
        made = Read(
            [sources.slice(item) for item in plan.slices],
            [sources.turn(item) for item in plan.slices],
            sources.copied,
        )
        if not sources.copied:
            self._read[key] = made
            while len(self._read) > _MOST:
                self._read.popitem(last=False)
        return made

    def forget(self, segments: Iterable[str]) -> None:
        """Let go of views of segments, before they are unmapped."""
        gone = frozenset(segments)
        for key in [key for key in self._read if not gone.isdisjoint(key[0])]:
            del self._read[key]
