"""Versions that are kept as the change of another one: proved, built, chained and folded."""

from __future__ import annotations

from weightsync_server.deltas.compaction import ChainSettings, Compactor
from weightsync_server.deltas.materializer import Materializer, PatchInput, find_base
from weightsync_server.deltas.pushed_delta import DeltaShard, PushedDelta

__all__ = [
    "ChainSettings",
    "Compactor",
    "DeltaShard",
    "Materializer",
    "PatchInput",
    "PushedDelta",
    "find_base",
]
