"""A repacked layer is told from a plain one by what vLLM's own dispatcher leaves in it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support.processors import HAS_AMX, LACKS_AMX

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]

AMX = pytest.param("amx", marks=pytest.mark.skipif(not HAS_AMX, reason=LACKS_AMX))

# A process of its own, because vLLM registers its operators and the switch changes vLLM for good.
_PROGRAM = """
import json
import torch
from weightsync.vllm import plugin
from weightsync.vllm.cpu_plain import leave_linear_plain
from weightsync.vllm.plan.live_params import why_not_plain
plugin._initialise_amx()
import vllm._custom_ops
import vllm.model_executor.layers.utils as utils

def reason(dtype, remove):
    layer = torch.nn.Linear(256, 512).to(dtype)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=remove)
    return str(why_not_plain(torch.nn.ModuleDict({"lm_head": layer})) or "")

seen = {"linear": reason(torch.float32, True), "head": reason(torch.float32, False)}
# Small ones of bfloat16 go to the sgl kernel where the processor has AMX.
seen["amx"] = reason(torch.bfloat16, False)

class Packed:
    # Stands for that kernel's operator, which needs AMX.
    convert_weight_packed = staticmethod(lambda weight: weight.clone())

real, utils.check_cpu_sgl_kernel = utils.check_cpu_sgl_kernel, lambda *a: True
operators, torch.ops._C = torch.ops._C, Packed
seen["sgl"] = reason(torch.bfloat16, False)
torch.ops._C, utils.check_cpu_sgl_kernel = operators, real
leave_linear_plain()
seen["off"] = [reason(d, r) for d in (torch.float32, torch.bfloat16) for r in (True, False)]
seen["untouched"] = str(why_not_plain(torch.nn.Linear(2, 2)) or "")
torch.cpu._is_amx_tile_supported = lambda: True
kinds = (torch.bfloat16, torch.int8)
seen["sgl_takes"] = [str(kind) for kind in kinds if utils.check_cpu_sgl_kernel(64, 64, kind)]
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


@pytest.mark.parametrize("layer", ["linear", "head", "sgl", AMX])
def test_repacked_layers_are_found(seen: dict[str, Any], layer: str) -> None:
    assert "repacked" in seen[layer]
    assert "lm_head" in seen[layer]
    assert "WEIGHTSYNC_CPU_PLAIN_WEIGHTS=1" in seen[layer]


def test_with_the_switch_all_layers_are_plain(seen: dict[str, Any]) -> None:
    assert seen["off"] == ["", "", "", ""]
    assert seen["untouched"] == ""


def test_the_switch_leaves_int8_to_the_kernel_whose_bytes_are_tensors(seen: dict[str, Any]) -> None:
    # Whichever was imported first: the plugin, or the kernels that ask.
    assert seen["sgl_takes"] == ["torch.int8"]
