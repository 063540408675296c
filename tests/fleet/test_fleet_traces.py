"""The trace of a version in a fleet of real servers: the coordinator's apply, and each host's."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from tests.support.fleet_registers import place_of
from tests.support.fleet_servers import FleetServers, all_serve, push
from tests.support.traced import Collector, Span, children, named

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(180)

_HOSTS = ("a", "b")


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with TemporaryDirectory(prefix="wsc") as name, Collector(Path(name) / "spans.jsonl") as made:
        yield made


@pytest.fixture(scope="module")
def fleet(collector: Collector) -> Iterator[FleetServers]:
    with TemporaryDirectory(prefix="wsf") as name, place_of("folder", "", Path(name)) as place:
        made = FleetServers(Path(name), place, _HOSTS)
        for host, server in made.servers.items():
            server.flags += ("--traces",)
            server.variables |= collector.variables | {"OTEL_SERVICE_NAME": host}
        yield made


def _hosts(spans: list[Span], name: str) -> set[str]:
    return {span["resource"]["service.name"] for span in named(spans, name)}


@pytest.mark.parametrize("order", ["rolling", "barrier"])
@pytest.mark.parametrize("asked", _HOSTS)
def test_a_version_is_one_trace_over_all_hosts(
    fleet: FleetServers, collector: Collector, order: str, asked: str
) -> None:
    with fleet.running() as clients:
        all_serve(
            clients, max(client.status().models[0].live_version for client in clients.values())
        )
        origin = clients["a"]
        with TracerProvider().get_tracer("trainer").start_as_current_span("step") as span:
            trace_id = trace.format_trace_id(span.get_span_context().trace_id)
            version = push(origin, sum(map(ord, order + asked)))
        clients[asked].fleet_apply(version, order=order)
        spans = collector.trace(
            trace_id,
            lambda found: bool(named(found, "fleet_apply")) and len(named(found, "member")) == 2,
        )
    (leader,) = named(spans, "fleet_apply")
    assert leader["resource"]["service.name"] == asked
    pushes = {span["resource"]["service.name"]: span for span in named(spans, "push")}
    assert pushes["b"]["parent"] == pushes["a"]["span_id"], "one host has it from the other"
    assert leader["parent"] == pushes[asked]["span_id"]
    members = named(spans, "member")
    assert _hosts(spans, "member") == set(_HOSTS)
    for member in members:
        assert member["parent"] == leader["span_id"]
        assert member["attributes"]["weightsync.result"] == "applied"
        assert int(member["attributes"]["weightsync.version"]) == version
        assert set(children(spans, member)) == {
            f"apply.{phase}"
            for phase in ("stage", "prepare", "pause", "commit", "verify", "resume")
        }
