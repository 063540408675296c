"""The parts of a server that use cases ask, as its stages have opened them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.attach import Attachments, InPlaceCalls
from weightsync_server.auth import Caller
from weightsync_server.catalog.table import check_model
from weightsync_server.engine import Applier
from weightsync_server.engine.apply_history import ApplyHistory
from weightsync_server.engine.served_engines import Engines
from weightsync_server.fleet_host.fleet_service import FleetService
from weightsync_server.model import Model
from weightsync_server.nodes import NodeGroup
from weightsync_server.ops.disk_watch import DiskWatch
from weightsync_server.ops.logprob_gaps import LogprobGaps
from weightsync_server.push import PushService, SameHostOffers


@dataclass(frozen=True, slots=True)
class VersionBundle:
    """What takes versions in and keeps them.

    `same_host` makes the offers of the same-host hand-off; None: none are made. `endpoints` returns
    where a caller may open streams besides. With an `origin` to follow, the server takes no pushes;
    empty: it follows none.
    """

    model: Model
    pushes: PushService
    disks: DiskWatch
    logprobs: LogprobGaps
    same_host: SameHostOffers | None = None
    endpoints: Callable[[Caller], list[str]] = lambda _: []
    origin: str = ""


@dataclass(frozen=True, slots=True)
class EngineBundle:
    """What brings versions to engines. A `fleet` of None: this server is a member of no fleet."""

    served: Engines
    applier: Applier
    attachments: Attachments
    transactions: InPlaceCalls
    nodes: NodeGroup
    history: ApplyHistory
    fleet: FleetService | None = None


@dataclass(frozen=True, slots=True)
class ServerCore:
    """What knows the answers."""

    versions: VersionBundle
    engines: EngineBundle
    status: Callable[[], pb.GetStatusResponse]

    def check_model(self, name: str) -> None:
        check_model(name, self.versions.model.table.name)
