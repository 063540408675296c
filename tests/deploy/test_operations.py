"""docs/operations.md says what is there: every metric, every alert, every exit code."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.compose_file import ROOT
from tests.deploy.promql import alert_rules
from weightsync_client.cli.exit_codes import MEANINGS
from weightsync_server.follow.follow_metrics import FollowMetrics
from weightsync_server.ops.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric

    from tests.deploy.conftest import LoneServer

PAGE = (ROOT / "docs/operations.md").read_text()


def _section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def _names(families: Iterable[Metric]) -> set[str]:
    return {family.name + ("_total" if family.type == "counter" else "") for family in families}


def _of_a_follower() -> set[str]:
    metrics = Metrics("m")
    FollowMetrics(metrics)
    return _names(metrics.registry.collect())


def test_every_metric_is_explained(lone_server: LoneServer) -> None:
    families = _names(text_string_to_metric_families(lone_server.scrape()))
    explained = set(re.findall(r"`((?:weightsync|grpc)_[a-z_]+)", _section("Metrics")))
    assert explained == families | _of_a_follower()


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
        assert (ROOT / "docs" / target).resolve().is_file(), target
