"""Names of the metrics that a server exports, by what it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from weightsync_server.extensions.trainer.trainer_pool import TrainMetrics
from weightsync_server.fleet.member_steps import HostMode
from weightsync_server.fleet_host.fleet_status import FleetMetrics
from weightsync_server.ops.metrics import Metrics
from weightsync_server.replicate.follower import FollowMetrics

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric

    from weightsync_server.fleet.fleet_member import FleetMember

__all__ = ["family_names", "of_some_servers"]


def family_names(families: Iterable[Metric]) -> set[str]:
    """Return the names of families as queries have them, but for parts of histograms."""
    return {family.name + ("_total" if family.type == "counter" else "") for family in families}


def of_some_servers() -> set[str]:
    """Return what servers that follow, are in a fleet or supervise a trainer have besides.

    Names alone are asked for, so nobody is in one.
    """
    metrics = Metrics("m")
    of_all = family_names(metrics.registry.collect())
    FollowMetrics(metrics)
    nobody = SimpleNamespace(
        view=SimpleNamespace(history=None, why=""),
        state=SimpleNamespace(mode=HostMode.SERVING),
        host=SimpleNamespace(live=lambda: 0),
    )
    TrainMetrics(metrics).track(up=int, queued=int)
    FleetMetrics(metrics, cast("FleetMember", nobody))
    return family_names(metrics.registry.collect()) - of_all
