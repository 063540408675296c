"""The compose file's own commands at work: a real vLLM, a real server and a real Prometheus.

Each runs under its uid in namespaces of its own and shares only the declared volumes.
"""

from __future__ import annotations

import json
import stat
import subprocess
import time
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.deploy.metric_families import of_some_servers
from tests.deploy.promql import (
    alert_rules,
    dashboard_queries,
    join_queries,
    metric_names,
    selectors,
)

if TYPE_CHECKING:
    from tests.deploy.conftest import Applied
    from tests.deploy.containers import Stack

# With the long tests, because it starts every service; `make test` keeps within 15 minutes so.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

#: This stack's server is neither.
_OTHERS = of_some_servers()
#: Of deploy/prometheus/prometheus.yml.
_SCRAPE_S = 5


def _ask(stack: Stack, query: str) -> list[Any]:
    """Return the samples that a query gives now."""
    address = "http://127.0.0.1:9090/api/v1/query?query="
    answer = json.loads(stack.get(address + urllib.parse.quote(query)))
    assert answer["status"] == "success", answer
    found = answer["data"]["result"]
    assert isinstance(found, list)
    return found


@pytest.fixture(scope="module")
def scrape(stack: Stack, applied: Applied) -> str:
    del applied
    return stack.get("http://127.0.0.1:9551/metrics")


@pytest.fixture(scope="module")
def scraped(stack: Stack, applied: Applied) -> Stack:
    """The stack, after Prometheus has seen the push and the apply twice."""
    del applied
    time.sleep(2 * _SCRAPE_S + 1)
    return stack


def test_services_are_apart(stack: Stack) -> None:
    vllm, server = stack.containers["vllm"], stack.containers["weightsync-server"]
    for namespace in ("mnt", "ipc", "pid"):
        links = {Path(f"/proc/{c.pid}/ns/{namespace}").readlink() for c in (vllm, server)}
        assert len(links) == 2
    for container in (vllm, server):
        entry = Path(f"/proc/{container.pid}").stat()
        assert (entry.st_uid, entry.st_gid) == (container.service.uid, container.service.gid)
    assert vllm.service.uid != server.service.uid
    # Neither sees what is the other's.
    assert vllm.run("ls", "/var/lib/weightsync").returncode != 0
    assert server.run("ls", "/model").returncode != 0
    assert server.run("ls", "/home/vllm").returncode != 0
    assert server.run("ls", "/dev/shm").stdout == ""
    assert server.run("touch", "/oops").returncode != 0


def test_sockets_are_for_the_group_alone(stack: Stack) -> None:
    names = ("sockets/engine.sock", "sockets/segments.sock", "sockets/read.sock")
    for name in (*names, "clients/weightsync.sock"):
        entry = stack.volume(name).stat()
        assert stat.filemode(entry.st_mode) == "srw-rw----", name
        assert entry.st_gid == stack.services["vllm"].gid


def test_vllm_may_look_and_no_more(stack: Stack) -> None:
    vllm = stack.containers["vllm"]
    assert vllm.run("weightsync", "status").returncode == 0
    denied = vllm.run("weightsync", "rollback")
    assert (denied.returncode, "read-socket may not call" in denied.stderr) == (9, True)
    assert vllm.run("ls", "/run/weightsync-clients").returncode != 0


def test_a_pushed_version_is_applied_and_live(stack: Stack, applied: Applied) -> None:
    from weightsync_client import ApplyOutcome, Client

    assert applied.pushed.durable
    assert applied.report.outcome is ApplyOutcome.APPLIED
    assert applied.report.version == applied.pushed.version
    with Client(f"unix:{stack.volume('clients')}/weightsync.sock") as client:
        (model,) = client.status().models
        assert model.live_version == applied.pushed.version
        assert model.live_content_digest == applied.pushed.content_digest
        proof = client.verify()
    assert proof.verified
    assert {rank.version for rank in proof.ranks} == {applied.pushed.version}
    assert (stack.volume("state") / "store").is_dir()


def test_vllm_answers_once_it_is_healthy(stack: Stack, applied: Applied) -> None:
    del applied
    models = json.loads(stack.get("http://127.0.0.1:8000/v1/models"))
    assert models["data"][0]["id"] == "default"


@pytest.mark.parametrize("name", ["vllm", "weightsync-server", "prometheus"])
def test_every_healthcheck_succeeds(stack: Stack, name: str) -> None:
    ran = stack.containers[name].run(*stack.services[name].healthcheck)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_promtool_finds_no_fault_in_a_scrape(promtool: str, scrape: str) -> None:
    command = [promtool, "check", "metrics"]
    ran = subprocess.run(command, input=scrape, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_every_metric_of_alerts_and_dashboard_is_in_a_scrape(scrape: str) -> None:
    live = {line.split("{")[0].split()[0] for line in scrape.splitlines() if line[:1] != "#"}
    queries = {rule["alert"]: rule["expr"] for rule in alert_rules()} | dashboard_queries()
    # Prometheus makes these two itself.
    unknown = {
        place: names
        for place, query in queries.items()
        if (names := metric_names(query) - live - _OTHERS - {"up", "ALERTS"})
    }
    assert not unknown


def test_prometheus_reaches_every_target(scraped: Stack) -> None:
    up = {sample["metric"]["job"]: sample["value"][1] for sample in _ask(scraped, "up")}
    assert up == {"weightsync": "1", "vllm": "1"}


def test_metrics_of_a_real_vllm_join_with_ours(scraped: Stack) -> None:
    running, fenced = join_queries()
    (sample,) = _ask(scraped, running)
    assert sample["value"][1] == "0"
    assert sample["metric"] == {
        "host": "generator-0",
        "model": "default",
        "model_name": "default",
        "engine": "engine",
        "vllm_engine": "0",
    }
    assert _ask(scraped, fenced) == []
    assert _ask(scraped, fenced.replace("== 1", "== 0"))


def test_every_query_of_the_dashboard_has_an_answer(scraped: Stack) -> None:
    empty = {}
    for place, query in dashboard_queries().items():
        # Rightly empty while nothing is wrong, and for a server alone.
        if metric_names(query) == {"ALERTS"} or metric_names(query) & _OTHERS:
            continue
        # Panels leave a gap where nothing happened: quantiles of no sample. An annotation is drawn
        # where it did.
        if place.startswith("annotation "):
            query = query.removesuffix(" > 0")  # noqa: PLW2901 - what is compared has an answer
        found = [sample["value"][1] for sample in _ask(scraped, query)]
        # This engine's versions are copied: nothing is loaded beside it.
        loads = metric_names(query) == {"weightsync_load_seconds_bucket"}
        if not found or (set(found) == {"NaN"} and not loads):
            empty[place] = (query, found)
    assert not empty


@pytest.mark.parametrize(
    "alert", [one["alert"] for one in alert_rules() if not metric_names(one["expr"]) & _OTHERS]
)
def test_alerts_see_their_series_and_are_silent(scraped: Stack, alert: str) -> None:
    (rule,) = [rule for rule in alert_rules() if rule["alert"] == alert]
    for selector in selectors(rule["expr"]):
        assert _ask(scraped, selector), selector
    assert _ask(scraped, rule["expr"]) == []


def test_the_server_stops_within_its_grace_and_vllm_serves_on(stack: Stack, scraped: Stack) -> None:
    """Last: what the tests before need ends here."""
    assert stack.containers["weightsync-server"].stop() == 0
    assert not (stack.volume("sockets") / "segments.sock").exists()
    models = json.loads(stack.get("http://127.0.0.1:8000/v1/models"))
    assert models["data"][0]["id"] == "default"
