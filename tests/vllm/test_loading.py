"""What vLLM's own loading makes of weights, and which models are refused because of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.vllm_server import cpu_environment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

# A process of its own, because the plugin and vLLM's environment change it for good. The models are
# loaded as a worker loads them, without an engine around them.
_PROGRAM = """
import json, sys, tempfile
import torch
from pathlib import Path
from tests.support.loaded_models import Loader, layout_of, tensors_of, unlike
from vllm.config import set_current_vllm_config
from weightsync.vllm.plan.capture import capture_plan
from weightsync.vllm.plan.live_params import LiveParameters
from weightsync.vllm.plan.load_watch import check_complete, made_by_loading
from weightsync.vllm.plan.in_place import why_not_plain
from weightsync.vllm.plan.load_plan import PlanRefusedError
from weightsync.vllm.bridge.engine_cores import EngineCores
from weightsync.vllm.bridge.support import config_refusals

def refused(model, covered):
    try:
        check_complete(model, covered)
    except PlanRefusedError as error:
        return error.names
    return []

seen = {}
loader = Loader(Path(tempfile.mktemp()))
for arch, folder in json.loads(sys.argv[1]).items():
    config = loader.config(folder)
    with set_current_vllm_config(config):
        model = loader.load(config)
        live = LiveParameters(model)
        plan, _ = capture_plan(model, live, layout_of(folder))
    covered = [live.tensor(name) for name in plan.written]
    found = {
        "unlike": unlike(plan, live, tensors_of(folder)),
        "refusals": config_refusals(config, EngineCores(None)), "plain": why_not_plain(model),
        "made": len(made_by_loading(model)), "left": refused(model, covered),
        "without_one": refused(model, [live.tensor(n) for n in plan.written if "norm" not in n]),
    }
    for module in model.modules():
        if hasattr(module, "W_UV"):
            weight = module.kv_b_proj.weight
            found["shared"] = (
                module.W_UV.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
            )
            # As where the kernel wants another layout, or another dtype.
            module.W_UV = torch.nn.Parameter(module.W_UV.clone(), requires_grad=False)
    found["copied"] = refused(model, covered)
    seen[arch] = found
print(json.dumps(seen))
"""

DENSE = ("llama", "qwen3", "gemma2", "gemma3")


@pytest.fixture(scope="module")
def seen(checkpoint: Callable[..., Path]) -> dict[str, Any]:
    # vLLM makes the group of expert parallel ranks only for a model with experts: that one first.
    models = {
        arch: str(checkpoint(arch, dtype="bfloat16", tied=arch.startswith("gemma")))
        for arch in ("qwen3_moe", *DENSE, "deepseek_v2")
    }
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps(models)],
        env={**os.environ, **cpu_environment()},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


@pytest.mark.parametrize("arch", [*DENSE, "qwen3_moe"])
def test_ordinary_models_read_nothing_that_an_update_does_not_reach(
    seen: dict[str, Any], arch: str
) -> None:
    found = seen[arch]
    assert found["refusals"] == []
    assert found["plain"] == ""
    assert found["made"] > 0
    assert found["left"] == found["copied"] == []
    # With the switch experts are plain too.
    assert found["unlike"] == []
    assert found["without_one"]
    assert all("norm" in name for name in found["without_one"])


def test_matrices_made_for_latent_attention_are_found_where_they_are_copies(
    seen: dict[str, Any],
) -> None:
    found = seen["deepseek_v2"]
    assert found["unlike"] == []
    assert found["refusals"] == [], "the proof at the start decides"
    # Where vLLM computes from views of kv_b_proj, they change with it.
    assert found["shared"] == (not found["left"])
    assert [name.rsplit(".", 1)[-1] for name in found["copied"]] == ["W_UV"] * 2
