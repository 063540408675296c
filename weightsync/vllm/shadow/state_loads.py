"""What a loader does with a version: how it is loaded, and whether the result may be used."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from weightsync.model.manifest import Layout
from weightsync.vllm.apply.device_ops import DeviceOps
from weightsync.vllm.plan.int_views import tensor_digest_of
from weightsync.vllm.plan.load_plan import PlanRefusedError, check_coverage
from weightsync.vllm.plan.load_watch import loaded_numbers, unwatched
from weightsync.vllm.plan.plan_cache import NeedsCaptureError, PlanCache, find_plan
from weightsync.vllm.plan.staged_tensors import StagedTensors
from weightsync.vllm.shadow.model_state import (
    LoadFacts,
    ModelState,
    check_same,
    state_of,
    weight_paths,
)
from weightsync.vllm.shadow.vllm_load import VersionSource, VllmLoad

if TYPE_CHECKING:
    from weightsync.shm.staged_version import StagedVersion
    from weightsync.vllm.apply.segment_mappings import SegmentMappings


class StateLoads:
    """Loads versions, the first of which is the engine's own checkpoint or one that was proved.

    Where vLLM's loaders only copy, all copies are made at once, as a capture knows them; else
    vLLM's loaders run each time. The segments of `mappings` outlast a load: mapping and registering
    a slot anew would take a quarter of it. `progress` is called with what is being done, and how
    much of it is, in per cent. `unread` names tensors of the last version of which no byte was
    read.
    """

    def __init__(
        self,
        load: VllmLoad,
        ops: DeviceOps,
        mappings: SegmentMappings,
        progress: Callable[[str, int], None],
    ) -> None:
        self._load = load
        self._ops = ops
        self._mappings = mappings
        self._progress = progress
        self._plans = PlanCache()
        self.unread: frozenset[str] = frozenset()
        #: What the first loader of this rank has found; None: this is the first.
        self._same_as: Mapping[str, str] | None = None
        #: Of the first version; None: none is loaded yet.
        self._first: ModelState | None = None
        self._paths: frozenset[str] = frozenset()
        self._numbers: frozenset[str] | None = None
        #: What vLLM's loaders read of the first version, where they run each time.
        self._first_read: tuple[Layout, frozenset[str]] | None = None

    @property
    def same_as(self) -> Mapping[str, str]:
        return self._plans.base.same_as if self._plans.base is not None else {}

    def expect(self, same_as: Mapping[str, str]) -> None:
        """Take over what the first loader of this rank has found; see `LoadFacts`."""
        self._same_as = same_as

    def state(self, socket: str, staged: StagedVersion) -> ModelState:
        """Return a version as loading leaves it in memory; the version before is gone.

        A refusal leaves nothing behind.
        """
        first = self._first
        # What becomes of the weights is known from the first load on; whatever else changes shows
        # in the comparison with that.
        watch = unwatched() if first is not None else contextlib.nullcontext()
        with watch:
            views = self._mappings.map(socket, staged.segments)
            model = self._loaded(staged, StagedTensors(staged.manifest.layout, views))
        if first is None:
            self._paths, self._numbers = weight_paths(model), loaded_numbers(model)
        state = state_of(model, self._paths, self._digests, self._numbers)
        if first is None:
            # Memory of a model that is gone shortly: what others are compared with is enough.
            self._first = type(state)(state.form, (), state.others)
        else:
            _check_alike(first, state)
        return state

    def _digests(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
        found = self._ops.digests(tensors)
        rest = tensors.keys() - found.keys()
        return found | {path: tensor_digest_of(tensors[path]) for path in rest}

    def _loaded(self, staged: StagedVersion, tensors: StagedTensors) -> torch.nn.Module:
        layout = staged.manifest.layout
        total = max(1, len(layout.tensors))
        source = VersionSource(
            layout, tensors, lambda count: self._progress("loading", 100 * count // total)
        )
        if self._first_read is None and self._captured(staged, tensors):
            plan = find_plan(staged.manifest, self._plans, tensors.uniform)
            self._progress("loading", 0)
            self.unread = frozenset(plan.ignored)
            return self._load.run_plan(plan, source, poison=self._first is None)
        return self._loaded_by_vllm(source)

    def _captured(self, staged: StagedVersion, tensors: StagedTensors) -> bool:
        """Return whether there is a plan of the layout; False: the model's loaders compute."""
        try:
            find_plan(staged.manifest, self._plans, tensors.uniform)
        except NeedsCaptureError:
            pass
        else:
            return True
        layout, base = staged.manifest.layout, self._plans.base
        self._progress("capturing", 0)
        try:
            with self._plans.remembering(layout.signature):
                plan = self._load.capture(layout)
                if base is not None:
                    check_coverage(plan, base)
        except PlanRefusedError:
            if base is not None:
                raise
            self._plans.refused.clear()
            return False
        finally:
            _free()
        if base is None and self._same_as is not None:
            plan.same_as.update(self._same_as)
        self._plans.add(plan)
        return True

    def _loaded_by_vllm(self, source: VersionSource) -> torch.nn.Module:
        if self._first_read is not None:
            check_same(source.layout, self._first_read[0])
        model, read = self._load.run(source)
        if self._first_read is None:
            self._first_read = source.layout, frozenset(read)
        self.unread = frozenset(t.name for t in source.layout.tensors) - read
        left = self._first_read[1] - read
        if left:
            msg = "vLLM loads nothing from these tensors of the version, as it did before"
            raise PlanRefusedError(msg, sorted(left))
        return model


def _check_alike(first: ModelState, state: ModelState) -> None:
    moved = state.form.differences(first.form)
    if moved:
        msg = (
            "vLLM makes another form or another number of these from this version than from the "
            "engine's checkpoint; restart vLLM to serve it"
        )
        raise PlanRefusedError(msg, moved)
    _facts(state).check(_facts(first))


def _facts(state: ModelState) -> LoadFacts:
    others = {path: digest.hex() for path, digest in state.others.items()}
    return LoadFacts(others, frozenset())


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
