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
import json, os, sys, tempfile
import torch
from pathlib import Path
from safetensors.torch import load_file
from weightsync.vllm import plugin
plugin.register()
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from weightsync.model.layout import check_shard, check_version, parse_header
from weightsync.model.manifest import ShardEntry
from weightsync.vllm.plan.capture import capture_plan
from weightsync.vllm.plan.live_params import LiveParameters, view_of
from weightsync.vllm.plan.load_watch import check_complete, made_by_loading
from weightsync.vllm.plan.in_place import why_not_plain
from weightsync.vllm.plan.load_plan import PlanRefusedError
from weightsync.vllm.bridge.support import config_refusals

def layout_of(folder):
    shards, tensors = [], []
    for index, file in enumerate(sorted(Path(folder).glob("*.safetensors"))):
        raw = file.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        shards.append(ShardEntry(file.name, len(raw), size))
        tensors.append(check_shard(shards[-1], parse_header(raw[8 : 8 + size], index)))
    return check_version(shards, tensors)

def unlike(plan, live, folder):
    # The parameters that are no copies of the checkpoint: what the proof at start finds.
    tensors = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        tensors |= load_file(file)
    return sorted({
        item.param
        for item in plan.slices
        if not view_of(live.tensor(item.param), item.target).equal(
            view_of(tensors[item.tensor], item.source)
        )
    })

def refused(model, covered):
    try:
        check_complete(model, covered)
    except PlanRefusedError as error:
        return error.names
    return []

# As vLLM's own worker for the CPU has it.
torch.accelerator.empty_cache = lambda: None
seen = {}
for arch, folder in json.loads(sys.argv[1]).items():
    config = EngineArgs(model=folder, dtype="bfloat16", enforce_eager=True).create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            rendezvous = "file://" + tempfile.mktemp()
            init_distributed_environment(1, 0, rendezvous, 0, "gloo")
            initialize_model_parallel(1)
        model = get_model(vllm_config=config)
        live = LiveParameters(model)
        plan, _ = capture_plan(model, live, layout_of(folder))
    covered = [live.tensor(name) for name in plan.written]
    found = {
        "unlike": unlike(plan, live, folder),
        "refusals": config_refusals(config), "plain": why_not_plain(model),
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
    # Experts are repacked on most processors; the proof at start then names them.
    assert all(name.endswith(("w13_weight", "w2_weight")) for name in found["unlike"])
    assert found["without_one"]
    assert all("norm" in name for name in found["without_one"])


def test_matrices_made_for_latent_attention_are_found_where_they_are_copies(
    seen: dict[str, Any],
) -> None:
    found = seen["deepseek_v2"]
    assert found["unlike"] == []
    (sentence,) = found["refusals"]
    assert "VLLM_MLA_DISABLE=1" in sentence
    # Where vLLM computes from views of kv_b_proj, they change with it.
    assert found["shared"] == (not found["left"])
    assert [name.rsplit(".", 1)[-1] for name in found["copied"]] == ["W_UV"] * 2
