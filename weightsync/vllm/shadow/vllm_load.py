"""vLLM's own first load of a model, from a staged version, and its parts' load plans.

The names of vLLM that it uses are alike in 0.26 to 0.33. vLLM itself loads so for its weight cache,
in a process per rank, without a worker and a model runner.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from weightsync.model.dtypes import torch_dtype
from weightsync.model.manifest import Layout
from weightsync.vllm.plan.capture import capture_plan
from weightsync.vllm.plan.live_params import LiveParameters, view_of
from weightsync.vllm.plan.load_plan import LoadPlan, PlanRefusedError, Slice
from weightsync.vllm.plan.model_parts import ModelWithDraft, PartNames
from weightsync.vllm.plan.read_watch import ReadWatch, values_read
from weightsync.vllm.shadow.arena import copy_in_pieces
from weightsync.vllm.shadow.loader_config import ModelLoad, PartLoad, fresh_config

if TYPE_CHECKING:
    from weightsync.vllm.plan.staged_tensors import StagedTensors


def capture_part(
    model: torch.nn.Module, names: PartNames, layout: Layout, shared: Collection[str] = ()
) -> LoadPlan:
    """Return the copies that load a part, with paths and names of the whole.

    `model` has no weights yet, and `layout` is of the whole. Copies into the modules at `shared`,
    which become another part's, are left out.
    """
    own = {names.own_name(tensor.name): tensor for tensor in layout.tensors}
    tensors = {name: tensor for name, tensor in own.items() if name is not None}
    part = Layout(
        layout.shards, tuple(replace(tensor, name=name) for name, tensor in tensors.items())
    )
    plan, _ = capture_plan(model, LiveParameters(model), part, dict)
    return replace(
        plan,
        slices=tuple(
            replace(item, tensor=tensors[item.tensor].name, param=names.path + item.param)
            for item in plan.slices
            if not any(item.param.startswith(f"{path}.") for path in shared)
        ),
        param_dtypes={names.path + name: dtype for name, dtype in plan.param_dtypes.items()},
        draft=frozenset(names.path + name for name in plan.written if names.path),
    )


def joined(plans: Sequence[LoadPlan], layout: Layout) -> LoadPlan:
    """Return the plans of all parts as one; nothing is read of what they ignore."""
    joint = LoadPlan(
        signature=layout.signature,
        tensors={t.name: (t.dtype, t.shape) for t in layout.tensors},
        slices=tuple(item for plan in plans for item in plan.slices),
        param_dtypes={name: kind for plan in plans for name, kind in plan.param_dtypes.items()},
        draft=frozenset(name for plan in plans for name in plan.draft),
    )
    return replace(joint, unread=frozenset(joint.ignored))


def slices_of(plan: LoadPlan, names: PartNames) -> Iterator[tuple[str, Slice]]:
    for item in plan.slices:
        if (item.param in plan.draft) == bool(names.path):
            yield item.param.removeprefix(names.path), item


class LoaderGroup:
    """The loaders of one engine: vLLM's layers ask for their groups when they are built.

    `rendezvous` is a `file://` path where only they meet. The argument `device` is the live rank's
    own, the attribute `device` where models are loaded.
    """

    def __init__(
        self, load: ModelLoad, rank: int, local_rank: int, rendezvous: str, device: str
    ) -> None:
        config = load.parts[0].config
        # What it changes of torch and vLLM when it is imported is changed in the live rank too.
        importlib.import_module(str(config.parallel_config.worker_cls).rpartition(".")[0])
        from vllm.config import set_current_vllm_config
        from vllm.platforms import current_platform
        from vllm.v1.worker.gpu_worker import init_worker_distributed_environment
        from vllm.v1.worker.workspace import init_workspace_manager

        self.device = torch.device(device)
        if self.device.type == "cuda":
            take_device(self.device, config.parallel_config)
        else:
            # Names shared memory of vLLM's CPU ranks, which is the live ranks' otherwise.
            os.environ["VLLM_DIST_IDENT"] = rendezvous.rpartition("/")[2]
        if getattr(config.parallel_config, "data_parallel_size", 1) > 1:
            _meet_here(config.parallel_config, rendezvous)
        with set_current_vllm_config(fresh_config(config)):
            init_worker_distributed_environment(
                config, rank, rendezvous, local_rank, current_platform.dist_backend
            )
        init_workspace_manager(self.device)


def take_device(device: torch.device, parallel: Any) -> None:
    """Compute on a rank's own device, which `--device-ids` may have chosen."""
    torch.cuda.set_device(device)
    assigned = getattr(parallel, "assigned_physical_gpu_ids", None)
    if assigned is not None:
        # As its workers do, for groups that ask where a rank is; not every release has it.
        from vllm.platforms.interface import set_assigned_physical_gpu_ids

        set_assigned_physical_gpu_ids(assigned)


def _meet_here(parallel: Any, rendezvous: str) -> None:
    """Let all replicas' loaders meet at one place; vLLM's own is where their ranks have met."""
    from vllm.distributed import parallel_state

    # With a store of its engine cores vLLM has the ranks agree on a port there; not every release.
    parallel._coord_store_port = None  # noqa: SLF001
    parallel._data_parallel_master_port_list = [0]  # noqa: SLF001 - taken, and then not used
    parallel_state.get_distributed_init_method = lambda *_: rendezvous


class VllmLoad:
    def __init__(self, load: ModelLoad) -> None:
        self._whole = load

    def run(self, source: VersionSource) -> tuple[torch.nn.Module, set[str]]:
        """Return a model with a version, by vLLM's loaders, and the names whose bytes were read."""
        watch = ReadWatch()

        def load(part: PartLoad, loader: Any, model: torch.nn.Module, own: Any) -> None:
            loader.get_all_weights = lambda *_: source.of_part(part.names, watch)
            own(model, part.model_config)

        with watch, values_read(watch.note):
            model = self._load(load)
        return model, watch.read

    def capture(self, layout: Layout) -> LoadPlan:
        """Return the copies that load a layout; loaders that do more than copy are refused."""
        found: list[LoadPlan] = []

        def load(part: PartLoad, loader: Any, model: torch.nn.Module, own: Any) -> None:
            del loader, own
            shared = self._whole.shared if part.names.path else ()
            found.append(capture_part(model, part.names, layout, shared))
            raise _CapturedError

        for part in self._whole.parts:
            with contextlib.suppress(_CapturedError):
                _load_part(part, load)
        return joined(found, layout)

    def run_plan(self, plan: LoadPlan, source: VersionSource, *, poison: bool) -> torch.nn.Module:
        """Return a model with a version, its bytes copied by a plan.

        `poison` fills memory that nothing initialises, so that a byte which the plan leaves out
        shows.
        """

        def load(part: PartLoad, loader: Any, model: torch.nn.Module, own: Any) -> None:
            del loader, own
            _copy(model, part.names, plan, source)

        with _poisoned() if poison else contextlib.nullcontext():
            return self._load(load)

    def _load(self, load: Any) -> torch.nn.Module:
        target, *drafts = (_load_part(part, load) for part in self._whole.parts)
        for draft in drafts:
            _share(target, draft, self._whole.shared)
            return ModelWithDraft(target, draft, self._whole.parts[1].names.tensors)
        return target


def _load_part(part: PartLoad, load: Any) -> torch.nn.Module:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    part = part.fresh()

    class Loader(DefaultModelLoader):  # type: ignore[misc]  # vLLM has no types here
        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            del model_config
            _end_poison()
            load(part, self, model, super().load_weights)

    # Not named where there is none: releases before 0.30 have no such argument.
    prefix = {"prefix": part.prefix} if part.prefix else {}
    with set_current_vllm_config(part.config):
        loaded: torch.nn.Module = Loader(part.config.load_config).load_model(
            vllm_config=part.config, model_config=part.model_config, **prefix
        )
    return loaded


def _share(target: torch.nn.Module, draft: torch.nn.Module, shared: Mapping[str, str]) -> None:
    """Put modules of a target into the place of its draft's, as vLLM did in the rank."""
    for path, other in shared.items():
        parent, _, key = path.rpartition(".")
        draft.get_submodule(parent)._modules[key] = target.get_submodule(other)  # noqa: SLF001 - what `add_module` refuses where a list holds it


class _CapturedError(Exception):
    """All that was wanted of a load is known."""


def _copy(model: torch.nn.Module, names: PartNames, plan: LoadPlan, source: VersionSource) -> None:
    live, staged = LiveParameters(model), source.staged
    placed = [
        (view_of(live.tensor(param), item.target), item) for param, item in slices_of(plan, names)
    ]
    with torch.no_grad():
        if placed and placed[0][0].device.type == "cuda":
            copy_in_pieces(placed, staged, placed[0][0].device)
            # What is computed next reads it, and what was mapped is unmapped some time.
            torch.cuda.synchronize()
            return
        for place, item in placed:
            place.copy_(staged.slice(item))


@contextlib.contextmanager
def _poisoned() -> Iterator[None]:
    # https://docs.pytorch.org/docs/stable/deterministic.html: with both, new memory is filled.
    settings: Any = torch.utils.deterministic
    before = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        yield
    finally:
        _end_poison()
        settings.fill_uninitialized_memory = before


def _end_poison() -> None:
    # Only while modules are built: it could choose other kernels for what is computed.
    torch.use_deterministic_algorithms(mode=False)


class VersionSource:
    """The tensors of a version; `progress` is called with how many were handed out."""

    def __init__(
        self, layout: Layout, staged: StagedTensors, progress: Callable[[int], None]
    ) -> None:
        unknown = [t.name for t in layout.tensors if torch_dtype(t.dtype) is None]
        if unknown:
            msg = "this torch has no such dtype; push the model in another dtype"
            raise PlanRefusedError(msg, unknown)
        self.layout = layout
        self.staged = staged
        self._progress = progress

    def of_part(
        self, names: PartNames, watch: ReadWatch | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor of a part with its name, as a reader of its checkpoint does."""
        for count, entry in enumerate(self.layout.tensors):
            name = names.own_name(entry.name)
            if name is not None:
                self._progress(count)
                tensor = self.staged.tensor(entry.name)
                if watch is not None:
                    watch.know(entry.name, tensor)
                yield name, tensor
