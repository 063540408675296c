"""What operators see of each engine: gauges with the label `engine`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Gauge

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["EngineGauges", "EngineMetrics"]

_GAUGES = {
    "weightsync_rank_version_skew": "Highest minus lowest version over the ranks.",
    "weightsync_fenced": "1 from a fence until the engine serves again.",
    "weightsync_serving": "1 while the engine serves one verified version.",
    "weightsync_engine_up": "1 while the engine answers.",
    "weightsync_live_check_timestamp_seconds": "When all live parameters were last compared and "
    "held the version, Unix time.",
    "weightsync_loader_up": "1 while every rank's loader can load.",
    "weightsync_arena_bytes": "Memory that holds what was loaded beside generation, over all "
    "ranks; 0: nothing is.",
}


class EngineGauges:
    """The gauges of one model's engines.

    Args:
        model: The configured model.
        registry: Where they live.
    """

    def __init__(self, model: str, registry: CollectorRegistry) -> None:
        self.model = model
        self.served = Gauge(
            "weightsync_served_version",
            "Version that a rank serves; 0: none.",
            ["model", "engine", "rank"],
            registry=registry,
        )
        self.gauges = {
            name: Gauge(name, text, ["model", "engine"], registry=registry)
            for name, text in _GAUGES.items()
        }


class EngineMetrics:
    """What is shown of one engine, from now until `remove`.

    Args:
        families: Of the model.
        engine: Its name.
    """

    def __init__(self, families: EngineGauges, engine: str) -> None:
        self._families = families
        self._engine = engine
        self._ranks: set[str] = set()
        # Each exists from the start.
        self._gauges = {
            name: gauge.labels(families.model, engine) for name, gauge in families.gauges.items()
        }

    def set_served(self, versions: Mapping[str, int]) -> None:
        """Set the version that each rank serves; ranks that are gone disappear."""
        for rank in self._ranks - versions.keys():
            self._families.served.remove(self._families.model, self._engine, rank)
        self._ranks = set(versions)
        for rank, version in versions.items():
            self._families.served.labels(self._families.model, self._engine, rank).set(version)
        skew = max(versions.values()) - min(versions.values()) if versions else 0
        self._gauges["weightsync_rank_version_skew"].set(skew)

    def set_engine(self, *, up: bool, fenced: bool, serving: bool) -> None:
        """Set whether the engine answers, is kept from serving, or serves."""
        self._gauges["weightsync_engine_up"].set(up)
        self._gauges["weightsync_fenced"].set(fenced)
        self._gauges["weightsync_serving"].set(serving)

    def set_live_checked(self) -> None:
        """Take note that all live parameters were compared and hold the version."""
        self._gauges["weightsync_live_check_timestamp_seconds"].set_to_current_time()

    def track_loads(self, up: Callable[[], float], arena_bytes: Callable[[], float]) -> None:
        """Have what is loaded beside generation read at each scrape."""
        self._gauges["weightsync_loader_up"].set_function(up)
        self._gauges["weightsync_arena_bytes"].set_function(arena_bytes)

    def remove(self) -> None:
        """Show nothing of it any more."""
        self.set_served({})
        for gauge in self._families.gauges.values():
            gauge.remove(self._families.model, self._engine)
