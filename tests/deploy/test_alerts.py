"""Alert rules and dashboard: valid, complete, and every alert tried in both directions."""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.deploy.compose_file import ROOT
from tests.deploy.promql import (
    ALERTS,
    ALERTS_TEST,
    alert_rules,
    dashboard,
    dashboard_queries,
    join_queries,
    metric_names,
    panels,
    selectors,
)

if TYPE_CHECKING:
    from pathlib import Path

RULES = {rule["alert"]: rule for rule in alert_rules()}


def _check(*command: str | Path) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_rules_are_valid(promtool: str) -> None:
    _check(promtool, "check", "rules", ALERTS)


def test_rules_behave(promtool: str) -> None:
    _check(promtool, "test", "rules", ALERTS_TEST)


def test_scrape_configuration_is_valid(promtool: str) -> None:
    _check(promtool, "check", "config", ROOT / "deploy/prometheus/prometheus.yml")


@pytest.mark.parametrize("alert", RULES)
def test_each_alert_fires_in_one_case_and_is_silent_in_another(alert: str) -> None:
    cases = [
        check["exp_alerts"]
        for test in yaml.safe_load(ALERTS_TEST.read_text())["tests"]
        for check in test["alert_rule_test"]
        if check["alertname"] == alert
    ]
    assert {bool(expected) for expected in cases} == {True, False}


@pytest.mark.parametrize("alert", RULES)
def test_each_alert_tells_what_to_do(alert: str) -> None:
    rule = RULES[alert]
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}


def test_dashboard_queries_are_valid(promtool: str, tmp_path: Path) -> None:
    rules = [
        {"record": f"place:{number}", "expr": query}
        for number, query in enumerate(dashboard_queries().values())
    ]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    _check(promtool, "check", "rules", file)


def test_metrics_of_vllm_join_with_ours(promtool: str, tmp_path: Path) -> None:
    running, fenced = join_queries()
    info = "weightsync_engine_info{model='m', vllm_version='0.32.0', instance='ws:9551', %s}"
    series = {
        # Host a: a vLLM with two cores, fenced. Host b: two vLLMs, one of them not ours.
        "vllm:num_requests_running{host='a', instance='v:8000', model_name='p', engine='0'}": 3,
        "vllm:num_requests_running{host='a', instance='v:8000', model_name='p', engine='1'}": 4,
        "vllm:num_requests_running{host='b', instance='v:8000', model_name='p', engine='0'}": 5,
        "vllm:num_requests_running{host='b', instance='v:8001', model_name='q', engine='0'}": 9,
        info % "host='a', engine='e0', model_name='p', vllm_engine='0'": 1,
        info % "host='a', engine='e0', model_name='p', vllm_engine='1'": 1,
        info % "host='b', engine='e1', model_name='p', vllm_engine='0'": 1,
        "weightsync_fenced{host='a', instance='ws:9551', model='m', engine='e0'}": 1,
        "weightsync_fenced{host='b', instance='ws:9551', model='m', engine='e1'}": 0,
    }
    joined = "{host='%s', model_name='p', vllm_engine='%s', model='m', engine='%s'}"
    answers = {
        running: {
            joined % ("a", "0", "e0"): 3, joined % ("a", "1", "e0"): 4,
            joined % ("b", "0", "e1"): 5,
        },
        fenced: {"{host='a', model_name='p'}": 7},
    }  # fmt: skip
    test = {
        "input_series": [{"series": one, "values": f"{n}x4"} for one, n in series.items()],
        "promql_expr_test": [
            {
                "expr": query,
                "eval_time": "1m",
                "exp_samples": [{"labels": one, "value": n} for one, n in samples.items()],
            }
            for query, samples in answers.items()
        ],
    }
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump({"evaluation_interval": "15s", "tests": [test]}))
    _check(promtool, "test", "rules", file)


def test_dashboard_takes_its_datasource_from_a_variable() -> None:
    assert dashboard()["templating"]["list"][0]["type"] == "datasource"
    holders = [*panels(), *(target for panel in panels() for target in panel["targets"])]
    for holder in [*holders, *dashboard()["annotations"]["list"]]:
        assert holder["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_dashboard_marks_applies_fences_and_starts() -> None:
    notes = {note["name"]: note for note in dashboard()["annotations"]["list"]}
    assert list(notes) == ["Applies", "Failed applies", "Fences", "Server starts"]
    for note in notes.values():
        # Grafana draws a mark for each value above 0.
        assert note["expr"].endswith(" > 0")
        for label in re.findall(r"{{(\w+)}}", note["titleFormat"] + note["textFormat"]):
            assert label in {"model", "instance", "engine", "outcome"}
    assert len({note["iconColor"] for note in notes.values()}) == len(notes)
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(dashboard()["panels"])


def test_dashboard_panels_have_titles_descriptions_and_room_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        assert panel["title"]
        assert panel["description"]
        grid = panel["gridPos"]
        cells = {
            (grid["x"] + dx, grid["y"] + dy) for dx in range(grid["w"]) for dy in range(grid["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("up", {"up"}),
        ('sum by (le) (rate(a_bucket{x=~"b|c"}[5m])) > 0.9', {"a_bucket"}),
        ('a unless on (instance, model) b{c!="d"} or e', {"a", "b", "e"}),
        ("histogram_quantile(0.5, sum by (le) (a)) / ignoring(x) group_left(y) b", {"a", "b"}),
        ("time() - max(a_seconds > 0)", {"a_seconds"}),
    ],
)
def test_metric_names_of_a_query(query: str, names: set[str]) -> None:
    assert metric_names(query) == names


def test_selectors_keep_their_matchers() -> None:
    assert selectors('increase(a{b="c"}[5m]) > 1') == ['a{b="c"}']


def test_only_the_exporters_of_this_project_are_asked() -> None:
    queries = [rule["expr"] for rule in RULES.values()] + list(dashboard_queries().values())
    for name in set().union(*map(metric_names, queries)) - {"up", "ALERTS"}:
        assert re.match("weightsync_|grpc_server_", name), name
