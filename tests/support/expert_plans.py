"""A program: loads a mixture of experts with vLLM, as one rank, and tells what its plans do.

Its argument is an order in JSON; see `main`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import save_file

from tests.support.loaded_models import Loader, layout_of, same, tensors_of, unlike, write
from tests.support.processors import hide_amx
from weightsync.model.manifest import Layout
from weightsync.vllm.plan.capture import capture_plan, unplaced
from weightsync.vllm.plan.halves import in_live_order
from weightsync.vllm.plan.live_params import LiveParameters, view_of, why_not_plain
from weightsync.vllm.plan.load_plan import LoadPlan, check_coverage, placeless

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weightsync.vllm.plan.load_plan import Slice
    from weightsync.vllm.plan.staged_tensors import StagedTensors

Tensors = dict[str, torch.Tensor]

_FIRST_EXPERTS = "model.layers.0.mlp.experts.routed_experts"


class Loaded:
    """A checkpoint as `in_live_order` asks for it."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def slice(self, item: Slice) -> torch.Tensor:
        return view_of(self._tensors[item.tensor], item.source)


def fused(tensors: Tensors) -> Tensors:
    """Return a checkpoint whose layers have one tensor for all gate and up projections."""
    made: Tensors = {}
    experts: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        layer, found, rest = name.partition(".experts.")
        number, _, projection = rest.partition(".")
        if found and number.isdecimal():
            kind = projection.removesuffix(".weight")
            experts.setdefault(layer, {}).setdefault(int(number), {})[kind] = tensor
        else:
            made[name] = tensor
    for layer, each in experts.items():
        every = [each[number] for number in sorted(each)]
        made[f"{layer}.experts.gate_up_proj"] = torch.stack(
            [torch.cat([one["gate_proj"], one["up_proj"]]) for one in every]
        )
        made[f"{layer}.experts.down_proj"] = torch.stack([one["down_proj"] for one in every])
    return made


def _fused_folder(folder: Path, place: Path) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    save_file(fused(tensors_of(folder)), place / "model.safetensors")
    return place


class Forms:
    """The same content in every form that vLLM's loaders take.

    Args:
        model: The rank's.
        live: Its parameters.
        fresh: Those of a model that vLLM loaded from the second content.
        contents: Folders of first and second content, by form.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        live: LiveParameters,
        fresh: Mapping[str, torch.Tensor],
        contents: Mapping[str, tuple[Path, Path]],
    ) -> None:
        self.model, self.live, self.fresh, self.contents = model, live, fresh, contents

    def plan(self, form: str, base: LoadPlan | None) -> LoadPlan:
        """Return the plan of a form."""
        first, _ = self.contents[form]
        plan, _ = capture_plan(self.model, self.live, layout_of(first))
        if base is not None:
            check_coverage(plan, base)

        def loaded() -> StagedTensors:
            return cast("StagedTensors", Loaded(tensors_of(first)))

        return in_live_order(plan, self.live, base, loaded)

    def look(self) -> dict[str, Any]:
        """Write the second content over the first one and back, in every form."""
        base = self.plan("each", None)
        seen: dict[str, Any] = {}
        for form, folders in self.contents.items():
            plan = base if form == "each" else self.plan(form, base)
            first, second = map(tensors_of, folders)
            before = unlike(plan, self.live, first)
            write(plan, self.live, second)
            after = [
                name
                for name, tensor in self.fresh.items()
                if not same(self.live.tensor(name), tensor)
            ]
            write(plan, self.live, first)
            seen[form] = {"unlike": before, "unlike_fresh": after}
        seen["params"] = sorted(base.exchanged)
        return seen


def _parts(forms: Forms) -> dict[str, list[str]]:
    """Return what the check of parts of a layout says of other forms."""
    base = forms.plan("each", None)
    layout = layout_of(forms.contents["fused"][0])
    new = tuple(t for t in layout.tensors if ".experts." in t.name)
    other = replace(
        new[0],
        name="model.layers.0.mlp.experts.w1_and_w3.weight",
        shape=(3, *new[0].shape),
    )
    seen = {}
    for kind, tensors in (("fused", new), ("other", (other,))):
        part = Layout(layout.shards, tensors)
        seen[kind] = placeless(part, base, unplaced(forms.model, forms.live, part))
    return seen


def _exchanged(forms: Forms) -> dict[str, Any]:
    """Have vLLM exchange halves as it does for FlashInfer's kernels, and look again."""
    from vllm.model_executor.layers.quantization.utils.flashinfer_utils import swap_w13_to_w31
    from vllm.model_executor.utils import replace_parameter

    plan = forms.plan("each", None)
    names = [name for name in plan.written if name.endswith("w13_weight")]
    fresh = dict(forms.fresh)
    for name in names:
        module = forms.model.get_submodule(name.rpartition(".")[0])
        replace_parameter(module, "w13_weight", swap_w13_to_w31(module.w13_weight))
        fresh[name] = swap_w13_to_w31(fresh[name])
    after = Forms(forms.model, forms.live, fresh, forms.contents)
    first = tensors_of(forms.contents["each"][0])
    seen = {"before": unlike(plan, forms.live, first), **after.look()}
    # One element of the half that the first slices fill.
    forms.live.tensor(names[0])[-1, -1, -1] += 1
    seen["torn"] = unlike(after.plan("each", None), forms.live, first)
    return seen


def _computed(model: torch.nn.Module) -> dict[str, list[float]]:
    """Return what the experts of the first layer make of some rows, by activation.

    Also of rows of which some ask for experts of another rank, and of those without these.
    """
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    layer: Any = model.get_submodule(_FIRST_EXPERTS)
    count, _, size = layer.w13_weight.shape
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(5, size, generator=generator).bfloat16()
    weights = torch.rand(5, 2, generator=generator)
    ids = torch.stack([torch.arange(5), torch.arange(5) + 2], dim=1).int() % count

    def compute(name: str, weights: torch.Tensor, expert_map: torch.Tensor | None) -> list[float]:
        output = torch.empty_like(rows)
        layer.quant_method.moe_kernel.fused_experts.apply(
            output=output,
            hidden_states=rows,
            w1=layer.w13_weight,
            w2=layer.w2_weight,
            topk_weights=weights,
            topk_ids=ids,
            activation=MoEActivation.from_str(name),
            global_num_experts=count,
            expert_map=expert_map,
            a1q_scale=None,
            a2_scale=None,
            workspace13=torch.empty(0),
            workspace2=torch.empty(0),
            expert_tokens_meta=None,
            apply_router_weight_on_input=False,
        )
        found: list[float] = output.float().flatten().tolist()
        return found

    with torch.inference_mode():
        names = ("silu", "gelu", "gelu_tanh", "swigluoai")
        seen = {name: compute(name, weights, None) for name in names}
        others = torch.where(torch.arange(count) % 2 == 0, torch.arange(count), -1)
        seen["mapped"] = compute("silu", weights, others.int())
        seen["without"] = compute("silu", weights * (ids % 2 == 0), None)
    return seen


def _isa(model: torch.nn.Module) -> str:
    """Return the instruction set that vLLM chose the kernel of experts for."""
    layer: Any = model.get_submodule(_FIRST_EXPERTS)
    return str(layer.quant_method.moe_kernel.fused_experts.isa)


def main(order: dict[str, Any]) -> dict[str, Any]:
    """Return what was seen.

    Args:
        order: `first` and `second`: folders of checkpoints of one layout; without a second one only
            what the model computes is told, for which instruction set, and whether it is plain.
            `rendezvous`, `rank`, `ranks`, `flags`: of `Loader`. `amx`: False where the processor
            counts as one without it.
    """
    if not order.get("amx", True):
        hide_amx()
    from vllm.config import set_current_vllm_config

    place = Path(order["rendezvous"])
    loader = Loader(place, order["rank"], order["ranks"], **order["flags"])
    first = Path(order["first"])
    config = loader.config(first)
    with set_current_vllm_config(config):
        model = loader.load(config)
        seen: dict[str, Any] = {"plain": str(why_not_plain(model) or "")}
        if "second" not in order:
            return seen | {"isa": _isa(model), "computed": _computed(model)}
        second = Path(order["second"])
    with set_current_vllm_config(loader.config(second)):
        other = loader.load(loader.config(second))
        fresh = {name: tensor.detach().clone() for name, tensor in other.named_parameters()}
    with set_current_vllm_config(config):
        own = place.with_name(f"{place.name}-{order['rank']}")
        contents = {
            "each": (first, second),
            "fused": (_fused_folder(first, own / "1"), _fused_folder(second, own / "2")),
        }
        forms = Forms(model, LiveParameters(model), fresh, contents)
        base = forms.plan("each", None)
        seen["bytes"] = sum(n for name, n in base.written.items() if ".experts." in name)
        return seen | forms.look() | {"parts": _parts(forms), "exchanged": _exchanged(forms)}


if __name__ == "__main__":
    sys.stdout.write(f"{json.dumps(main(json.loads(sys.argv[1])))}\n")
