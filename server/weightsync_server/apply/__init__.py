"""Weights go out: making a version live on every rank, or changing nothing."""

from __future__ import annotations

from weightsync_server.apply.applier import Applier
from weightsync_server.apply.journal import Journal
from weightsync_server.apply.keeper import Keeper

__all__ = ["Applier", "Journal", "Keeper"]
