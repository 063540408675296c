"""What the engine's room uses of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightsync_server.catalog.accepted_tensors import AcceptedTensors
    from weightsync_server.catalog.engine_layouts import EngineLayouts
    from weightsync_server.catalog.serving import ServingState
    from weightsync_server.catalog.table import VersionTable
    from weightsync_server.model import Model
    from weightsync_server.nodes import NodeGroup
    from weightsync_server.residency.adoption import CheckpointAdoption
    from weightsync_server.residency.incoming import IncomingVersions
    from weightsync_server.residency.segments import SegmentAllocator
    from weightsync_server.residency.stager import Stager

__all__ = ["ModelParts"]


@dataclass(frozen=True)
class ModelParts:
    """The parts of one model that lead to its engines.

    Attributes:
        table: Which versions exist.
        serving: Which of them is live, and which may be.
        stager: Gives leases on them.
        adoption: Makes one of the engine's checkpoint.
        accepted: Which tensors the engines take.
        engine_layouts: What the engines hold.
        segments: Owns what the ranks map.
        incoming: Announces versions that still come in.
        slots: How many versions memory holds at once.
        nodes: Servers of the engine's other nodes; None: none may join.
    """

    table: VersionTable
    serving: ServingState
    stager: Stager
    adoption: CheckpointAdoption
    accepted: AcceptedTensors
    engine_layouts: EngineLayouts
    segments: SegmentAllocator
    incoming: IncomingVersions
    slots: int
    nodes: NodeGroup | None = None

    @classmethod
    def of(cls, model: Model, nodes: NodeGroup | None = None) -> ModelParts:
        """Return those of a model."""
        return cls(
            model.table,
            model.serving,
            model.stager,
            model.adoption,
            model.accepted,
            model.engine_layouts,
            model.segments,
            model.incoming,
            len(model.slots.slots),
            nodes,
        )
