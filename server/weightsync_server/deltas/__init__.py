"""Versions that are kept as the change of another one: proved, built, chained and folded."""

from __future__ import annotations

from weightsync_server.deltas.bases import find_base
from weightsync_server.deltas.compaction import ChainLimits, Folder
from weightsync_server.deltas.materializer import Builder, Changed
from weightsync_server.deltas.pushed_delta import DeltaCounts, DeltaShard, PushedDelta

__all__ = [
    "Builder",
    "ChainLimits",
    "Changed",
    "DeltaCounts",
    "DeltaShard",
    "Folder",
    "PushedDelta",
    "find_base",
]
