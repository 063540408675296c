"""Weights go out: making a version live on every rank of every engine, or changing nothing."""

from __future__ import annotations

from weightsync_server.engine.applier import Applier
from weightsync_server.engine.engine_participant import EngineApplier
from weightsync_server.engine.engine_parts import ApplySettings, EngineContext
from weightsync_server.engine.engine_set import EngineSet
from weightsync_server.engine.journal import Journal, JournalFile
from weightsync_server.engine.supervisor import EngineSupervisor

__all__ = [
    "Applier",
    "ApplySettings",
    "EngineApplier",
    "EngineContext",
    "EngineSet",
    "EngineSupervisor",
    "Journal",
    "JournalFile",
]
