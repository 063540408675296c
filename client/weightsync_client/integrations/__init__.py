"""Adapters for training frameworks; a framework is imported when its adapter is asked for.

from weightsync_client.integrations import WeightSyncCallback
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightsync_client.integrations.transformers_callback import WeightSyncCallback

__all__ = ["WeightSyncCallback"]


def __getattr__(name: str) -> Any:
    if name != "WeightSyncCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from weightsync_client.integrations.transformers_callback import WeightSyncCallback
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise  # Something that transformers itself lacks, which it says better.
        raise ImportError(
            "WeightSyncCallback needs transformers, which is not installed here; install it with "
            "`pip install transformers accelerate`",
            name="transformers",
        ) from None
    return WeightSyncCallback
