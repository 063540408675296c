"""Adapters for training frameworks; a framework is imported when its adapter is asked for.

from weightsync_client.integrations import WeightSyncCallback, WeightSyncTransfer
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightsync_client.integrations.answer_fields import (
        VersionLabels,
        miles_meta_info,
        verl_extra_fields,
    )
    from weightsync_client.integrations.torchtitan_store import WeightSyncStore
    from weightsync_client.integrations.transformers_callback import WeightSyncCallback
    from weightsync_client.integrations.trl_transfer import WeightSyncTransfer
    from weightsync_client.integrations.vllm_transfer import (
        WeightSyncTrainerEngine,
        WeightSyncTrainerInitInfo,
    )

__all__ = [
    "VersionLabels",
    "WeightSyncCallback",
    "WeightSyncStore",
    "WeightSyncTrainerEngine",
    "WeightSyncTrainerInitInfo",
    "WeightSyncTransfer",
    "miles_meta_info",
    "verl_extra_fields",
]

#: Module of each adapter, the package that it imports, and what to install for it.
_ADAPTERS = {
    # Nothing of verl or miles is imported for their fields.
    "VersionLabels": ("answer_fields", "grpc", "weightsync"),
    "miles_meta_info": ("answer_fields", "grpc", "weightsync"),
    "verl_extra_fields": ("answer_fields", "grpc", "weightsync"),
    "WeightSyncCallback": ("transformers_callback", "transformers", "transformers accelerate"),
    # Of torchtitan itself it imports nothing.
    "WeightSyncStore": ("torchtitan_store", "torch", "torch"),
    "WeightSyncTrainerEngine": ("vllm_transfer", "vllm", "vllm"),
    "WeightSyncTrainerInitInfo": ("vllm_transfer", "vllm", "vllm"),
    # Of TRL itself it imports nothing: the hook is an interface. TRL brings transformers.
    "WeightSyncTransfer": ("trl_transfer", "transformers", "'trl==1.16.*'"),
}


def __getattr__(name: str) -> Any:
    if name not in _ADAPTERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, package, install = _ADAPTERS[name]
    if importlib.util.find_spec(package) is None:
        raise ImportError(
            f"run `pip install {install}`: {name} needs {package}",
            name=package,
        )
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
