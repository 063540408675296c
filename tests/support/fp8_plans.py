"""A program: loads block fp8 with vLLM, as one rank, and tells what its plans do.

Loaders, parameters and what vLLM does to them after loading are its own. Only the kernels are
chosen as on a GPU without DeepGEMM, for on a CPU there are none for most machines; none is run.
Its argument is an order in JSON; see `main`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.support.expert_plans import Forms
from tests.support.loaded_models import Loader, layout_of
from weightsync.vllm.plan.live_params import LiveParameters
from weightsync.vllm.plan.load_plan import PlanRefusedError, check_against_base
from weightsync.vllm.plan.load_watch import check_complete, check_read


def choose_kernels(experts: str) -> None:
    """Have vLLM choose what it would on a GPU.

    Args:
        experts: A member of vLLM's Fp8MoeBackend.
    """
    from vllm.model_executor.kernels.linear.scaled_mm import cutlass
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
        FP8ScaledMMLinearLayerConfig,
    )
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization import fp8

    def linear(module_name: str, **config: Any) -> Any:
        del module_name
        return cutlass.CutlassFp8BlockScaledMMKernel(FP8ScaledMMLinearLayerConfig(**config))

    fp8.init_fp8_linear_kernel = linear
    fp8.select_fp8_moe_backend = lambda **_: (Fp8MoeBackend[experts], object)
    fp8.make_fp8_moe_kernel = lambda **_: None


def _refusals(forms: Forms, bfloat16: Path) -> list[str]:
    """Return the tensors of an unquantised checkpoint that are refused."""
    try:
        check_against_base(layout_of(bfloat16), forms.plan("each", None), alone=True)
    except PlanRefusedError as error:
        return sorted(error.names)
    return []


def main(order: dict[str, Any]) -> dict[str, Any]:
    """Return what was seen.

    Args:
        order: `first` and `second`: folders of fp8 checkpoints of one layout; `bfloat16`: the first
            one before it was quantised. `experts`: see `choose_kernels`. `rendezvous`, `rank`,
            `ranks`: of `Loader`.
    """
    from vllm.config import set_current_vllm_config

    loader = Loader(Path(order["rendezvous"]), order["rank"], order["ranks"])
    choose_kernels(order["experts"])
    first, second = Path(order["first"]), Path(order["second"])
    models = {}
    for folder in (first, second):
        config = loader.config(folder)
        with set_current_vllm_config(config):
            models[folder] = loader.load(config)
    live = LiveParameters(models[first])
    fresh = {name: tensor.detach() for name, tensor in models[second].named_parameters()}
    with set_current_vllm_config(loader.config(first)):
        forms = Forms(models[first], live, fresh, {"each": (first, second)})
        plan = forms.plan("each", None)
        check_complete(models[first], map(live.tensor, plan.written))
        check_read(models[first], plan)
        dtypes = {item.param: plan.param_dtypes[item.param] for item in plan.slices}
        kinds = sorted(set(dtypes.values()))
        refused = _refusals(forms, Path(order["bfloat16"]))
        return {**forms.look(), "dtypes": kinds, "refused": refused}


if __name__ == "__main__":
    sys.stdout.write(f"{json.dumps(main(json.loads(sys.argv[1])))}\n")
