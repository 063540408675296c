"""A program: loads models with vLLM as a rank and its loader do, and tells how they are updated.

Its argument is an order in JSON; see `main`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.support.loaded_models import Loader, files_of, layout_of, tensors_of, unlike, write
from tests.support.processors import hide_amx
from weightsync.model.manifest import Manifest
from weightsync.shm.staged_version import StagedVersion
from weightsync.vllm.apply.host_ops import HostOps
from weightsync.vllm.apply.segment_mappings import SegmentMappings
from weightsync.vllm.bridge.llm_calls import EngineCores
from weightsync.vllm.bridge.support import config_refusals
from weightsync.vllm.plan.capture import capture_plan
from weightsync.vllm.plan.int_views import tensor_digest_of
from weightsync.vllm.plan.live_params import LiveParameters, why_not_plain
from weightsync.vllm.plan.load_plan import PlanRefusedError
from weightsync.vllm.plan.load_watch import (
    check_complete,
    check_read,
    forward_tensors,
    made_by_loading,
)
from weightsync.vllm.plan.model_parts import PartNames
from weightsync.vllm.shadow.loader_config import ModelLoad, PartLoad
from weightsync.vllm.shadow.model_state import state_of
from weightsync.vllm.shadow.state_loads import StateLoads
from weightsync.vllm.shadow.vllm_load import VllmLoad

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from weightsync.vllm.plan.load_plan import LoadPlan
    from weightsync.vllm.shadow.model_state import ModelState


class _Files(SegmentMappings):
    """The files of checkpoints in the place of segments."""

    def map(self, socket: str, ids: Sequence[str]) -> list[memoryview]:
        del socket
        return [memoryview(Path(each).read_bytes()) for each in ids]


def _staged(folder: Path) -> StagedVersion:
    layout, tensors = layout_of(folder), tensors_of(folder)
    digests = tuple(tensor_digest_of(tensors[entry.name]) for entry in layout.tensors)
    return StagedVersion(Manifest(layout, digests), tuple(map(str, files_of(folder))))


def _load(loader: Loader, folder: Path) -> tuple[Any, torch.nn.Module]:
    from vllm.config import set_current_vllm_config

    config = loader.config(folder)
    with set_current_vllm_config(config):
        return config, loader.load(config)


def _digests(model: torch.nn.Module) -> dict[str, str]:
    """Return the digests of all that a model computes from."""
    tensors = ((path, tensor.detach()) for path, tensor in forward_tensors(model))
    return {path: tensor_digest_of(tensor).hex() for path, tensor in tensors if tensor.numel()}


def _between(model: torch.nn.Module, fresh: torch.nn.Module) -> list[str]:
    """Return the paths of what differs between two models."""
    mine, theirs = _digests(model), _digests(fresh)
    return sorted(p for p in mine.keys() | theirs.keys() if mine.get(p) != theirs.get(p))


def _left(model: torch.nn.Module, covered: Iterable[torch.Tensor]) -> list[str]:
    """Return the paths of what a plan leaves as it was, if it covers these tensors."""
    try:
        check_complete(model, covered)
    except PlanRefusedError as error:
        return error.names
    return []


def _by_plan(
    plan: LoadPlan,
    live: LiveParameters,
    model: torch.nn.Module,
    fresh: torch.nn.Module,
    folders: Sequence[Path],
) -> dict[str, Any]:
    """Write the second content over the first one."""
    first, second = map(tensors_of, folders)
    covered = [live.tensor(name) for name in plan.written]
    found: dict[str, Any] = {
        "unlike": unlike(plan, live, first),
        "without_norms": _left(model, [live.tensor(n) for n in plan.written if "norm" not in n]),
    }
    write(plan, live, second)
    found["unlike_fresh"] = _between(model, fresh)
    for module in model.modules():
        if hasattr(module, "W_UV"):
            # As where the kernel wants another layout, or another dtype.
            made = module.get_parameter("W_UV").clone()
            module.W_UV = torch.nn.Parameter(made, requires_grad=False)
    return {**found, "copied": _left(model, covered)}


def _unlike_live(state: ModelState, live: ModelState) -> list[str]:
    moved = state.form.differences(live.form)
    pairs = zip(state.memory, live.memory, strict=not moved)
    return moved or [
        live.form.named(at) for at, (a, b) in enumerate(pairs) if not torch.equal(a, b)
    ]


def _by_twin(
    config: Any, model: torch.nn.Module, fresh: torch.nn.Module, folders: Sequence[Path]
) -> dict[str, Any]:
    """Load both contents as a loader does, and put the second one where the first one is live."""
    part = PartLoad(config, config.model_config, "", PartNames())
    ops = HostOps(torch.device("cpu"))
    loads = StateLoads(VllmLoad(ModelLoad((part,))), ops, _Files(), lambda *_: None)
    first, second = map(_staged, folders)
    try:
        live = state_of(model)
        found = {"unlike": _unlike_live(loads.state("", first), live)}
        loaded = loads.state("", second)
    except PlanRefusedError as error:
        return {"refused": str(error), "names": error.names}
    for place, piece in zip(live.memory, loaded.memory, strict=True):
        place.copy_(piece)
    return {
        **found,
        "refused": "",
        "unlike_fresh": _between(model, fresh),
        "names": sorted(live.form.tensors),
    }


def _look(loader: Loader, folders: Sequence[Path]) -> dict[str, Any]:
    config, model = _load(loader, folders[0])
    _, fresh = _load(loader, folders[1])
    found = {
        "refusals": config_refusals(config, EngineCores(None)),
        "plain": str(why_not_plain(model) or ""),
        "made": len(made_by_loading(model) or ()),
    }
    assert _between(model, fresh)
    live = LiveParameters(model)
    # As a rank does it, which looks first whether its layers are plain.
    try:
        plan, _ = capture_plan(model, live, layout_of(folders[0]))
        check_complete(model, map(live.tensor, plan.written))
        check_read(model, plan)
    except PlanRefusedError as error:
        twin = _by_twin(config, model, fresh, folders)
        return {**found, "why": str(error), "twin": twin}
    return {**found, "why": "", "plan": _by_plan(plan, live, model, fresh, folders)}


def main(order: dict[str, Any]) -> dict[str, Any]:
    """Return what was seen, by the names of the models.

    Args:
        order: `models`: folders of two checkpoints of one layout, by name; `amx`: whether the
            processor is one with AMX; `rendezvous`: of `Loader`.
    """
    if not order["amx"]:
        hide_amx()
    loader = Loader(Path(order["rendezvous"]))
    models: dict[str, list[str]] = order["models"]
    return {name: _look(loader, [*map(Path, folders)]) for name, folders in models.items()}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))) + "\n")
