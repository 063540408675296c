"""Pages for operators say what is there: every metric, every alert, every exit code."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.compose_file import ROOT
from tests.deploy.metric_families import family_names, of_some_servers
from tests.deploy.promql import alert_rules, dashboard, dashboard_queries, metric_names
from weightsync.vllm.extensions.answers import answer_versions
from weightsync_client.cli.cli_options import MEANINGS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.deploy.conftest import LoneServer

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
METRICS = (DOCS / "reference/metrics.md").read_text()
RUNBOOK = (DOCS / "operate/runbook.md").read_text()
EXIT_CODES = (DOCS / "reference/exit-codes.md").read_text()


def _titles(page: str) -> set[str]:
    """Return the titles of a page, and its other places, as links name them."""
    titles = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    named = {re.sub(r"[^a-z0-9 _-]", "", title.lower()).replace(" ", "-") for title in titles}
    return named | set(re.findall(r'<a id="([^"]+)"></a>', page))


def test_every_metric_is_explained(lone_server: LoneServer) -> None:
    families = family_names(text_string_to_metric_families(lone_server.scrape()))
    explained = set(re.findall(r"`((?:weightsync|grpc)_[a-z0-9_]+)", METRICS))
    assert explained == families | of_some_servers() | _of_vllm()


def _of_vllm() -> set[str]:
    """Return the families that the plugin adds to vLLM's own metrics."""
    counters = answer_versions._counters()
    assert counters is not None
    return {f"{family.name}_total" for counter in counters for family in counter.describe()}


def test_the_dashboard_asks_for_metrics_that_there_are(lone_server: LoneServer) -> None:
    families = family_names(text_string_to_metric_families(lone_server.scrape()))
    known = families | of_some_servers() | {"ALERTS"}
    for place, query in dashboard_queries().items():
        asked = {name.removesuffix("_bucket") for name in metric_names(query)}
        assert asked <= known, place


def test_the_dashboard_shows_what_some_servers_alone_have() -> None:
    queries = dashboard_queries().values()
    shown = set().union(*map(metric_names, queries))
    others = {name for name in of_some_servers() if not name.startswith("weightsync_train")}
    assert others <= shown


def test_the_page_names_the_rows_of_the_dashboard() -> None:
    rows = [panel["title"] for panel in dashboard()["panels"] if panel["type"] == "row"]
    page = " ".join((DOCS / "operate/monitoring.md").read_text().split())
    assert f"Its rows are {', '.join(rows[:-1])} and {rows[-1]};" in page


def test_every_alert_is_explained_with_its_severity() -> None:
    rows = re.findall(r"^\| (?:<a [^|]*</a>)(WeightSync\w+) \| (\w+) \|", RUNBOOK, re.MULTILINE)
    assert rows == [(rule["alert"], rule["labels"]["severity"]) for rule in alert_rules()]


@pytest.mark.parametrize("rule", alert_rules(), ids=lambda rule: rule["alert"])
def test_every_alert_leads_to_its_row(rule: dict[str, Any]) -> None:
    where, _, path = rule["annotations"]["runbook_url"].partition("}}")
    assert where == "{{ $externalLabels.weightsync_docs "
    page, _, place = path.partition("#")
    assert f'| <a id="{place}"></a>{rule["alert"]} |' in (ROOT / page).read_text()


def test_every_exit_code_is_explained() -> None:
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", EXIT_CODES, re.MULTILINE)
    assert [(int(code), text) for code, text in rows[:5]] == [
        (0, "stopped as asked"),
        (1, "could not start; the last line says why and what to do"),
        (2, "wrong flag or setting"),
        (3, "no client can connect any more, by a fault of gRPC; to be started again"),
        (
            4,
            (
                "stopped as asked, but something had not stopped within `--drain-timeout-s` and "
                "`--stop-timeout-s`; the log names it"
            ),
        ),
    ]
    assert {int(code): text for code, text in rows[5:]} == {int(c): m for c, m in MEANINGS.items()}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_place_that_a_page_links_to_is_there(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if "://" not in target:
            name, _, title = target.partition("#")
            linked = (page.parent / name).resolve() if name else page
            assert linked.exists(), target
            assert not title or title in _titles(linked.read_text()), target
