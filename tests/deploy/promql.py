"""The alert rules and the dashboard as data: their queries, and what those queries select."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import yaml

from tests.deploy.compose_file import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "ALERTS",
    "ALERTS_TEST",
    "DASHBOARD",
    "alert_rules",
    "dashboard",
    "dashboard_queries",
    "join_queries",
    "metric_names",
    "panels",
    "selectors",
]

ALERTS = ROOT / "deploy/prometheus/alerts.yml"
ALERTS_TEST = ROOT / "deploy/prometheus/alerts_test.yml"
DASHBOARD = ROOT / "deploy/grafana/weightsync.json"

_KEYWORDS = {"and", "or", "unless", "bool", "offset"}
_LISTS = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
_RANGE = re.compile(r"\[[^\]]*\]")
_SELECTOR = re.compile(r"([A-Za-z_:][\w:]*)\s*(\{[^}]*\})?\s*(\()?")


def selectors(query: str) -> list[str]:
    """Return the instant selectors of a query, label matchers included."""
    plain = _RANGE.sub("", _LISTS.sub("", query))
    return [
        name + (labels or "")
        for name, labels, call in _SELECTOR.findall(plain)
        if not call and name not in _KEYWORDS
    ]


def metric_names(query: str) -> set[str]:
    """Return the names of the metrics that a query reads."""
    return {selector.partition("{")[0] for selector in selectors(query)}


def alert_rules() -> list[dict[str, Any]]:
    """Return the alerting rules."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    """Return the dashboard."""
    document = json.loads(DASHBOARD.read_text())
    assert isinstance(document, dict)
    return document


def panels() -> Iterator[dict[str, Any]]:
    """Yield the panels that show something."""
    yield from (panel for panel in dashboard()["panels"] if panel["type"] != "row")


def join_queries() -> list[str]:
    """Return the queries of the page about monitoring, which join our metrics with vLLM's."""
    page = (ROOT / "docs/operate/monitoring.md").read_text()
    return re.findall(r"```promql\n(.*?)```", page, re.DOTALL)


def dashboard_queries() -> dict[str, str]:
    """Return the query of every target and annotation by its place, variables filled in."""
    found = {
        f"{panel['title']}/{target['refId']}": target["expr"]
        for panel in panels()
        for target in panel["targets"]
    }
    notes = dashboard()["annotations"]["list"]
    found |= {f"annotation {note['name']}": note["expr"] for note in notes}
    values = {"$__rate_interval": "1m", "$__interval": "1m"} | dict.fromkeys(
        ("$instance", "$model", "$engine"), ".*"
    )
    for place, query in found.items():
        for variable, value in values.items():
            query = query.replace(variable, value)  # noqa: PLW2901 - filled in step by step
        found[place] = query
    return found
