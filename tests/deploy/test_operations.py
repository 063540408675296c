"""docs/operations.md says what is there: every metric, every alert, every exit code."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.compose_file import ROOT
from tests.deploy.promql import alert_rules
from weightsync_client.cli.exit_codes import MEANINGS
from weightsync_server.fleet.member_steps import Mode
from weightsync_server.fleet_host.fleet_metrics import FleetMetrics
from weightsync_server.follow.follow_metrics import FollowMetrics
from weightsync_server.ops.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric

    from tests.deploy.conftest import LoneServer
    from weightsync_server.fleet.fleet_member import FleetMember

PAGE = (ROOT / "docs/operations.md").read_text()


def _section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def _titles(page: str) -> set[str]:
    """Return the titles of a page as links name them."""
    titles = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}


def _names(families: Iterable[Metric]) -> set[str]:
    return {family.name + ("_total" if family.type == "counter" else "") for family in families}


def _of_followers_and_members() -> set[str]:
    """Of servers that follow or are in a fleet; names alone are asked for, so nobody is in one."""
    metrics = Metrics("m")
    FollowMetrics(metrics)
    nobody = SimpleNamespace(
        view=SimpleNamespace(history=None, why=""),
        state=SimpleNamespace(mode=Mode.SERVING),
        host=SimpleNamespace(live=lambda: 0),
    )
    FleetMetrics(metrics, cast("FleetMember", nobody))
    return _names(metrics.registry.collect())


def test_every_metric_is_explained(lone_server: LoneServer) -> None:
    families = _names(text_string_to_metric_families(lone_server.scrape()))
    explained = set(re.findall(r"`((?:weightsync|grpc)_[a-z_]+)", _section("Metrics")))
    assert explained == families | _of_followers_and_members()


def test_every_alert_is_explained_with_its_severity() -> None:
    rows = re.findall(r"^\| (WeightSync\w+) \| (\w+) \|", PAGE, re.MULTILINE)
    assert rows == [(rule["alert"], rule["labels"]["severity"]) for rule in alert_rules()]


def test_every_exit_code_is_explained() -> None:
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", _section("Exit codes"), re.MULTILINE)
    assert [(int(code), text) for code, text in rows[:4]] == [
        (0, "stopped as asked"),
        (1, "could not start; the last line says why and what to do"),
        (2, "wrong flag or setting"),
        (3, "nobody could connect any more, by a fault of gRPC; to be started again"),
    ]
    assert {int(code): text for code, text in rows[4:]} == {int(c): m for c, m in MEANINGS.items()}


def test_every_file_it_names_is_there() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        page, _, title = target.partition("#")
        linked = (ROOT / "docs" / page).resolve()
        assert linked.is_file(), target
        assert not title or title in _titles(linked.read_text()), target
