"""The load plans of a rank, by the layouts that they are for."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightsync.model.name_sets import unpack
from weightsync.vllm.plan.load_plan import PlanRefusedError, check_against_base

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from weightsync.model.manifest import Manifest
    from weightsync.vllm.plan.load_plan import LoadPlan

__all__ = ["NeedsCaptureError", "PlanCache", "find_plan"]


#: Refusals that a rank remembers.
_REFUSALS = 64


class NeedsCaptureError(Exception):
    """There is no load plan for this layout yet."""


@dataclass
class PlanCache:
    """The load plans of a rank.

    Attributes:
        base: The first one, captured for the adopted checkpoint; what is covered is measured by it.
        by_signature: All of them.
        refused: What was said of layouts that the model cannot take, by their signatures: their
            plans need not be captured again to say so.
        alone: Whether no other rank loads a tensor that this one does not.
        unloaded: Names of the tensors that no rank of the engine loads, by signature.
    """

    base: LoadPlan | None = None
    alone: bool = True
    by_signature: dict[str, LoadPlan] = field(default_factory=dict)
    unloaded: dict[str, frozenset[str]] = field(default_factory=dict)
    refused: OrderedDict[str, tuple[str, list[str]]] = field(default_factory=OrderedDict)

    def add(self, plan: LoadPlan) -> None:
        """Keep a plan; the first one becomes the base."""
        if self.base is None:
            self.base = plan
        self.by_signature[plan.signature] = plan
        if self.alone:
            self.unloaded[plan.signature] = frozenset(plan.ignored)

    def learn(self, signature: str, unloaded: str) -> None:
        """Take note of what no rank loads of a layout, as the server has it from all of them.

        Args:
            signature: Of the layout.
            unloaded: The names, as `name_sets` packs them; "": nothing new.

        Raises:
            ValueError: It is not about this layout, or names a tensor that this rank loads.
        """
        plan = self.by_signature.get(signature)
        if not unloaded or plan is None:
            return
        names = unpack(unloaded, plan.tensors)
        if loaded := names & plan.loaded:
            msg = f"{min(loaded)} is said to be loaded by no rank, but this one loads it"
            raise ValueError(msg)
        self.unloaded[signature] = names

    def check(self, signature: str) -> None:
        """Refuse a layout that was refused before.

        Raises:
            PlanRefusedError: As then.
        """
        if signature in self.refused:
            self.refused.move_to_end(signature)
            raise PlanRefusedError(*self.refused[signature])

    @contextlib.contextmanager
    def remembering(self, signature: str) -> Iterator[None]:
        """Remember a refusal of a layout that is raised meanwhile."""
        try:
            yield
        except PlanRefusedError as error:
            self.refused[signature] = error.message, error.names
            while len(self.refused) > _REFUSALS:
                self.refused.popitem(last=False)
            raise


def find_plan(
    manifest: Manifest, plans: PlanCache, uniform: Callable[[str], bool] = lambda _: False
) -> LoadPlan:
    """Return the plan for a version.

    Args:
        manifest: Of the version.
        plans: Those there are.
        uniform: Tells whether one of its tensors, by name, holds one value all over.

    Raises:
        NeedsCaptureError: Its layout is new, or nobody has said yet what no rank loads of it; the
            model's loaders must run once on every rank.
        PlanRefusedError: It cannot fit the adopted model; with names.
    """
    layout = manifest.layout
    plans.check(layout.signature)
    plan = plans.by_signature.get(layout.signature)
    if plan is None:
        if plans.base is not None:
            check_against_base(layout, plans.base, alone=plans.alone)
        raise NeedsCaptureError
    unloaded = plans.unloaded.get(layout.signature)
    if unloaded is None:
        raise NeedsCaptureError
    digests = dict(zip((t.name for t in layout.tensors), manifest.digests, strict=True))
    if plan is plans.base:
        plan.note_ignored(digests, unloaded, uniform)
    assert plans.base is not None  # noqa: S101 - there is a plan, so there is a first one
    plan.accept_ignored(digests, plans.base, unloaded)
    return plan
