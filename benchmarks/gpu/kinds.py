"""The kinds of models that the GPU tests and benchmarks serve, and how vLLM is started for each.

docs/reference/models.md has a row for each of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.models import DeepSeek, Qwen3, block_fp8
from benchmarks.gpu.spec import ModelSpec

__all__ = ["KINDS", "MOE30", "Kind"]

#: vLLM asks for a kernel of DeepGEMM unless it is told not to. Its kernels are compiled when they
#: are first run; all of them ahead would take minutes.
_DEEP_GEMM = {"VLLM_USE_DEEP_GEMM": "1", "VLLM_DEEP_GEMM_WARMUP": "skip"}
_NO_DEEP_GEMM = {"VLLM_USE_DEEP_GEMM": "0"}


@dataclass(frozen=True)
class Kind:
    """One kind.

    Attributes:
        name: In tests, parts and figures.
        small: For tests.
        full: For benchmarks.
        scales: Dtype of the scales of a checkpoint in block fp8; empty: it is in bfloat16.
        arguments: Of vLLM's engine, by the names of AsyncEngineArgs.
        variables: Environment variables of vLLM.
    """

    name: str
    small: Qwen3 | DeepSeek
    full: Qwen3 | DeepSeek
    scales: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    def spec(self, *, small: bool) -> ModelSpec:
        """Return the model."""
        made = (self.small if small else self.full).spec
        return block_fp8(made, self.scales) if self.scales else made

    @property
    def flags(self) -> list[str]:
        """The arguments as vLLM's command line takes them."""
        found = []
        for name, value in self.arguments.items():
            text = value if isinstance(value, str) else json.dumps(value)
            found += [f"--{name.replace('_', '-')}", text]
        return found


_DENSE = Qwen3(4, 512, 1024, 8, 2, 512), Qwen3(12, 2560, 9728, 32, 8, 32_768)
_MOE = (
    Qwen3(4, 512, 256, 8, 2, 512, experts=16, active=4),
    Qwen3(8, 2048, 768, 32, 4, 32_768, experts=32, active=8),
)
_LATENT = DeepSeek(3, 512, 256, 16, 512, 16, 4), DeepSeek(7, 2048, 768, 16, 32_768, 32, 6)
_DRAFTED = (
    DeepSeek(3, 512, 256, 16, 512, 16, 4, draft_layers=1),
    DeepSeek(7, 2048, 768, 16, 32_768, 32, 6, draft_layers=1),
)
_MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("qwen3_moe_bf16", *_MOE),
        Kind("qwen3_moe_fp8", *_MOE, "BF16", variables=_NO_DEEP_GEMM),
        Kind("qwen3_moe_fp8_deepgemm", *_MOE, "BF16", variables=_DEEP_GEMM),
        Kind("qwen3_fp8_online", *_DENSE, arguments={"quantization": "fp8"}),
        Kind("deepseek_bf16", *_LATENT),
        Kind("deepseek_fp8", *_LATENT, "F32", variables=_NO_DEEP_GEMM),
        Kind("deepseek_mtp", *_DRAFTED, arguments=_MTP),
    )
}

#: The shape of Qwen3-30B-A3B.
MOE30 = Kind(
    "moe30",
    _MOE[0],
    Qwen3(48, 2048, 768, 32, 4, 151_936, experts=128, active=8),
    "BF16",
    variables=_DEEP_GEMM,
)
