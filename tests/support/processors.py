"""Both kinds of processors that vLLM packs weights for: this one, and one like it without AMX.

vLLM asks torch what the processor can, in every process, and chooses by that what it makes of the
weights that it loads. What is here lets torch say that there is no AMX.
"""

from __future__ import annotations

import os
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "HAS_AMX",
    "HAS_FP8_CACHE",
    "LACKS_AMX",
    "LACKS_FP8_CACHE",
    "NO_AMX",
    "hide_amx",
    "without_amx",
]

#: Whether this processor has it.
HAS_AMX = bool(torch.cpu._is_amx_tile_supported())
#: Whether vLLM has a quantised key-value cache on it.
HAS_FP8_CACHE = HAS_AMX or bool(torch.cpu._is_avx512_supported())
#: Why a test is skipped that needs it.
LACKS_FP8_CACHE = "this processor has neither AVX-512 nor AMX, without which vLLM caches no fp8"
#: The same of AMX.
LACKS_AMX = "this processor has no AMX, for which vLLM packs weights otherwise"
#: Environment of a process whose oneDNN does without it, too.
NO_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}


def hide_amx() -> None:
    """Let torch say in this process, from now on, that the processor has no AMX."""
    cpu: Any = torch.cpu
    found = cpu.get_capabilities()
    without = {**found, **{name: False for name in found if name.startswith("amx")}}
    cpu.get_capabilities = lambda: MappingProxyType(without)
    assert not cpu._is_amx_tile_supported()


def without_amx(folder: Path) -> dict[str, str]:
    """Return the environment of a vLLM, and of its children, whose processor has no AMX.

    Args:
        folder: For the plugin that sees to it.
    """
    info = folder / "without_amx-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: without-amx\nVersion: 0\n")
    plugin = f"[vllm.general_plugins]\nwithout_amx = {hide_amx.__module__}:{hide_amx.__name__}\n"
    (info / "entry_points.txt").write_text(plugin)
    before = os.environ.get("PYTHONPATH", "")
    paths = [str(folder), *filter(None, before.split(os.pathsep))]
    plugins = {"PYTHONPATH": os.pathsep.join(paths), "VLLM_PLUGINS": "weightsync,without_amx"}
    return {**NO_AMX, **plugins}
