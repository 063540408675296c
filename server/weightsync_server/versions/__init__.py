"""Which versions exist, where their bytes lie, who may write, and what is live."""

from __future__ import annotations

from weightsync_server.versions.arriving import Arriving
from weightsync_server.versions.budget import SegmentBudget
from weightsync_server.versions.deltas import ChainLimits, DeltaCounts, find_base
from weightsync_server.versions.feed import Change
from weightsync_server.versions.leases import SlotLease
from weightsync_server.versions.ports import Fetchers, Meters, NoMeters
from weightsync_server.versions.proving import ShardDigests, digesting
from weightsync_server.versions.records import VersionRecord
from weightsync_server.versions.registry import ModelVersions
from weightsync_server.versions.retention import Retention
from weightsync_server.versions.scrubber import Scrubber
from weightsync_server.versions.slots import Slot

__all__ = [
    "Arriving",
    "ChainLimits",
    "Change",
    "DeltaCounts",
    "Fetchers",
    "Meters",
    "ModelVersions",
    "NoMeters",
    "Retention",
    "Scrubber",
    "SegmentBudget",
    "ShardDigests",
    "Slot",
    "SlotLease",
    "VersionRecord",
    "digesting",
    "find_base",
]
