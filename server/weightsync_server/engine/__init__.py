"""Weights go out: making a version live on every rank of every engine, or changing nothing."""

from __future__ import annotations

from weightsync_server.engine.applier import Applier
from weightsync_server.engine.apply_limits import ApplyLimits
from weightsync_server.engine.engine_applier import EngineApplier
from weightsync_server.engine.engine_set import EngineSet
from weightsync_server.engine.host_parts import HostParts
from weightsync_server.engine.journal import Journal
from weightsync_server.engine.journal_file import JournalFile
from weightsync_server.engine.model_parts import ModelParts
from weightsync_server.engine.supervisor import EngineSupervisor
from weightsync_server.engine.update_committer import UpdateCommitter

__all__ = [
    "Applier",
    "ApplyLimits",
    "EngineApplier",
    "EngineSet",
    "EngineSupervisor",
    "HostParts",
    "Journal",
    "JournalFile",
    "ModelParts",
    "UpdateCommitter",
]
