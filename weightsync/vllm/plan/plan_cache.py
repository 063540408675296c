"""The load plans of a rank, by the layouts that they are for."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from weightsync.model.manifest import Manifest
from weightsync.model.name_sets import unpack
from weightsync.vllm.plan.load_plan import LoadPlan, PlanRefusedError, check_against_base

#: Refusals that a rank remembers.
_REFUSALS = 64


class NeedsCaptureError(Exception):
    """There is no load plan for this layout yet."""


@dataclass
class PlanCache:
    """The load plans of a rank; `base` is the first one, captured for the adopted checkpoint.

    `refused` is what was said of layouts that the model cannot take, and `unloaded` names the
    tensors that no rank of the engine loads, both by signature. `alone` says whether no other rank
    loads a tensor that this one does not.
    """

    base: LoadPlan | None = None
    alone: bool = True
    by_signature: dict[str, LoadPlan] = field(default_factory=dict)
    unloaded: dict[str, frozenset[str]] = field(default_factory=dict)
    refused: OrderedDict[str, tuple[str, list[str]]] = field(default_factory=OrderedDict)

    def add(self, plan: LoadPlan) -> None:
        if self.base is None:
            self.base = plan
        self.by_signature[plan.signature] = plan
        if self.alone:
            self.unloaded[plan.signature] = frozenset(plan.ignored)

    def learn(self, signature: str, unloaded: str) -> None:
        """Take note of what no rank loads of a layout, packed by `name_sets`; "": nothing new.

        Raises ValueError if it is not of this layout, or names a tensor that this rank loads.
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
        if signature in self.refused:
            self.refused.move_to_end(signature)
            raise PlanRefusedError(*self.refused[signature])

    @contextlib.contextmanager
    def remembering(self, signature: str) -> Iterator[None]:
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
    """Return the plan for a version; `uniform` is as for `note_ignored`.

    Raises NeedsCaptureError if the model's loaders must run once on every rank first.
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
