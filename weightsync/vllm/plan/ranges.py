"""The slices of a load plan as few ranges of parameters.

Fused parameters are filled by several slices without a gap between them, those of experts by
hundreds: beside each other they are one range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightsync.vllm.plan.live_params import view_of
from weightsync.vllm.plan.load_plan import Strides

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from weightsync.vllm.plan.live_params import Targets
    from weightsync.vllm.plan.load_plan import Slice

__all__ = ["LiveRanges", "ParamRange", "Part", "ranges_of"]


@dataclass(frozen=True, slots=True)
class Part:
    """A slice within a range: its index in the plan, and where it begins, in elements."""

    index: int
    begin: int


@dataclass(frozen=True, slots=True)
class ParamRange:
    """What slices fill together.

    Attributes:
        param: Name of the live parameter.
        place: Which part of it; without gaps unless a single slice has some.
        parts: The slices, in the order in which they lie there.
    """

    param: str
    place: Strides
    parts: tuple[Part, ...]


def ranges_of(slices: Sequence[Slice]) -> Iterator[ParamRange]:
    """Yield the ranges of a plan, in the order of its parameters.

    Args:
        slices: The copies. They do not overlap; those without elements are in no range.
    """
    by_param: dict[str, list[int]] = {}
    for index, item in enumerate(slices):
        if item.target.numel:
            by_param.setdefault(item.param, []).append(index)
    for param, indices in by_param.items():
        run: list[Part] = []
        begin = end = 0
        for index in sorted(indices, key=lambda index: slices[index].target.offset):
            target = slices[index].target
            if not target.contiguous:
                yield ParamRange(param, target, (Part(index, 0),))
                continue
            if run and target.offset != end:
                yield ParamRange(param, _row(begin, end), tuple(run))
                run = []
            if not run:
                begin = target.offset
            run.append(Part(index, target.offset - begin))
            end = target.offset + target.numel
        if run:
            yield ParamRange(param, _row(begin, end), tuple(run))


def _row(begin: int, end: int) -> Strides:
    return Strides(begin, (end - begin,), (1,))


class LiveRanges:
    """The ranges of a plan in the live parameters.

    Args:
        slices: Of the plan.
        joined: Whether neighbours are one range; else each slice is one.

    Attributes:
        all: The ranges.
    """

    def __init__(self, slices: Sequence[Slice], *, joined: bool) -> None:
        self._joined = joined
        self.all: Sequence[ParamRange] = (
            tuple(ranges_of(slices))
            if joined
            else [ParamRange(s.param, s.target, (Part(i, 0),)) for i, s in enumerate(slices)]
        )
        self._of: list[torch.Tensor] | None = None
        self._views: list[torch.Tensor] = []

    def views(self, targets: Targets) -> list[torch.Tensor]:
        """Return a live view of each.

        Args:
            targets: The live destinations of the same slices, the same at every call.

        Raises:
            ParameterChangedError: As `Targets.views`.
        """
        views = targets.views()
        if not self._joined:
            return views
        if self._of is not views:
            self._views = [view_of(targets.param(each.param), each.place) for each in self.all]
            self._of = views
        return self._views
