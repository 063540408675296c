"""Weights go out: making a version live on every rank, or changing nothing."""

from __future__ import annotations

from weightsync_server.engine.applier import Applier
from weightsync_server.engine.apply_limits import ApplyLimits
from weightsync_server.engine.journal import Journal
from weightsync_server.engine.model_parts import ModelParts
from weightsync_server.engine.supervisor import EngineSupervisor
from weightsync_server.engine.update_committer import UpdateCommitter

__all__ = ["Applier", "ApplyLimits", "EngineSupervisor", "Journal", "ModelParts", "UpdateCommitter"]
