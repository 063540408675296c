from __future__ import annotations

import asyncio
import contextlib
import platform
import time
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from weightsync import __version__
from weightsync.engine import EngineInfo, EngineState
from weightsync_server.http import http_server
from weightsync_server.http.http_server import MetricsEndpoint
from weightsync_server.http.known_hosts import KnownHosts
from weightsync_server.ops.metrics import (
    INVARIANTS,
    PAUSE_BUCKETS,
    PHASES,
    DeltaCounts,
    Metrics,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("m")


@pytest.fixture
async def endpoint(metrics: Metrics) -> AsyncIterator[MetricsEndpoint]:
    made = MetricsEndpoint(metrics.registry, "127.0.0.1", 0)
    yield made
    made.close()
    await asyncio.sleep(0)


async def _ask(
    port: int, request: bytes = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.close()


def test_every_child_exists_from_the_start(metrics: Metrics) -> None:
    metrics.engine("e0")
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
    }
    for outcome in ("committed", "already", "failed", "aborted"):
        assert samples["weightsync_pushes_total", "m", outcome] == 0
    for outcome in ("applied", "already_live", "planned", "refused", "restored", "fenced"):
        assert samples["weightsync_applies_total", "m", outcome] == 0
    for outcome in ("passed", "failed", "cancelled"):
        assert samples["weightsync_live_checks_total", "m", outcome] == 0
    for invariant in INVARIANTS:
        assert samples["weightsync_invariant_violations_total", invariant] == 0
    for phase in PHASES:
        assert samples[f"weightsync_{phase}_duration_seconds_count", "m"] == 0
    for name in (
        "weightsync_received_bytes_total",
        "weightsync_applied_bytes_total",
        "weightsync_fetcher_restarts_total",
        "weightsync_last_apply_timestamp_seconds",
        "weightsync_load_seconds_count",
        "weightsync_loader_restarts_total",
    ):
        assert samples[name, "m"] == 0
    for name in (
        "weightsync_rank_version_skew",
        "weightsync_fenced",
        "weightsync_serving",
        "weightsync_engine_up",
        "weightsync_live_check_timestamp_seconds",
    ):
        assert samples[name, "m", "e0"] == 0
    (build,) = [labels for (name, *labels) in samples if name == "weightsync_build_info"]
    assert build[:2] == [__version__, platform.python_version()]
    assert all(build)


def test_there_are_the_phases_and_buckets_of_the_issue(metrics: Metrics) -> None:
    wanted = {"receive", "digest", "persist", "prepare", "pause", "commit", "verify", "resume"}
    assert wanted <= set(PHASES)
    assert PAUSE_BUCKETS == (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
    assert len(INVARIANTS) == len(set(INVARIANTS)) == 12


def test_what_happens_is_counted(metrics: Metrics) -> None:
    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, {"model": "m"} | labels)

    metrics.count_push("committed")
    metrics.count_apply("restored")
    metrics.add_received(5)
    metrics.add_written(7)
    metrics.count_fetcher_restart()
    metrics.observe_phase("pause", 0.003)
    metrics.violate("bounded")
    assert value("weightsync_pushes_total", outcome="committed") == 1
    assert value("weightsync_applies_total", outcome="restored") == 1
    assert value("weightsync_last_apply_timestamp_seconds") == 0
    assert value("weightsync_received_bytes_total") == 5
    assert value("weightsync_applied_bytes_total") == 7
    assert value("weightsync_fetcher_restarts_total") == 1
    assert value("weightsync_pause_duration_seconds_bucket", le="0.0025") == 0
    assert value("weightsync_pause_duration_seconds_bucket", le="0.005") == 1
    assert metrics.violations() == dict.fromkeys(INVARIANTS, 0) | {"bounded": 1}
    metrics.count_apply("applied")
    stamp = value("weightsync_last_apply_timestamp_seconds")
    assert stamp is not None
    assert abs(stamp - time.time()) < 5


def test_deltas_are_counted(metrics: Metrics) -> None:
    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(
            f"weightsync_delta_{name}", {"model": "m"} | labels
        )

    for coding in ("unchanged", "gap16", "gap8", "bitmap", "dense"):
        assert value("tensors_total", coding=coding) == 0
    for reason in ("first", "no_room", "new_run", "base_mismatch", "layout_changed", "copied"):
        assert value("fallbacks_total", reason=reason) == 0
    for name in ("bytes_total", "dense_bytes_total", "folds_total", "changed_fraction"):
        assert value(name) == 0
    metrics.count_delta(DeltaCounts(10, 1000, 0.01, {"unchanged": 3, "gap8": 2}))
    metrics.count_delta(DeltaCounts(20, 1000, 0.02, {"gap8": 5}))
    metrics.count_fallback("too_dense")
    metrics.count_fallback("whatever a stranger says")
    metrics.deltas.count_fold()
    assert (value("bytes_total"), value("dense_bytes_total")) == (30, 2000)
    assert value("changed_fraction") == 0.02
    assert value("tensors_total", coding="gap8") == 7
    assert value("tensors_total", coding="unchanged") == 3
    assert value("fallbacks_total", reason="too_dense") == 1
    assert value("fallbacks_total", reason="other") == 1
    assert value("folds_total") == 1


def test_loads_are_counted(metrics: Metrics) -> None:
    def value(name: str) -> float | None:
        return metrics.registry.get_sample_value(f"weightsync_{name}", {"model": "m"})

    metrics.loaders.count(400.0, 2)
    metrics.loaders.count(0.0, 1)
    assert (value("load_seconds_count"), value("load_seconds_sum")) == (1, 400)
    assert value("loader_restarts_total") == 3
    get = metrics.registry.get_sample_value
    slow = get("weightsync_load_seconds_bucket", {"model": "m", "le": "600.0"})
    assert slow == 1, "a load may take minutes"


def test_ranks_that_are_gone_disappear(metrics: Metrics) -> None:
    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(
            f"weightsync_{name}", {"model": "m", "engine": "e0"} | labels
        )

    engine = metrics.engine("e0")
    engine.set_served({"0/0/0": 3, "0/0/1": 5})
    assert value("rank_version_skew") == 2
    engine.set_served({"0/0/1": 5})
    assert value("served_version", rank="0/0/0") is None
    assert value("served_version", rank="0/0/1") == 5
    engine.set_served({})
    assert value("rank_version_skew") == 0


def test_each_engine_has_its_own_versions_and_state(metrics: Metrics) -> None:
    def value(name: str, engine: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(
            f"weightsync_{name}", {"model": "m", "engine": engine} | labels
        )

    first, second = metrics.engine("e0"), metrics.engine("e1")
    first.set_served({"0/0/0": 3})
    second.set_served({"0/0/0": 7})
    second.set_engine(up=True, fenced=True, serving=False)
    assert [value("served_version", name, rank="0/0/0") for name in ("e0", "e1")] == [3, 7]
    assert [value("rank_version_skew", name) for name in ("e0", "e1")] == [0, 0]
    assert [value("fenced", name) for name in ("e0", "e1")] == [0, 1]
    assert [value("engine_up", name) for name in ("e0", "e1")] == [0, 1]
    second.remove()
    assert value("served_version", "e1", rank="0/0/0") is None
    assert value("fenced", "e1") is None
    assert value("served_version", "e0", rank="0/0/0") == 3


def test_an_engine_is_named_as_in_metrics_of_vllm(metrics: Metrics) -> None:
    def named() -> list[tuple[str, ...]]:
        samples = [
            sample
            for family in metrics.registry.collect()
            for sample in family.samples
            if family.name == "weightsync_engine_info"
        ]
        assert {sample.value for sample in samples} <= {1}
        names = ("model", "engine", "model_name", "vllm_engine", "vllm_version")
        return sorted(tuple(sample.labels[name] for name in names) for sample in samples)

    engine, other = metrics.engine("e0"), metrics.engine("e1")
    assert named() == []
    ranks = ("0/0/0", "0/0/1", "1/0/0", "1/0/1")
    engine.set_info(_info("policy", ranks))
    other.set_info(_info("policy-e1", ("0/0/0",)))
    assert named() == [
        ("m", "e0", "policy", "0", "0.32.0"),
        ("m", "e0", "policy", "1", "0.32.0"),
        ("m", "e1", "policy-e1", "0", "0.32.0"),
    ]
    # It was started again with another name and one core.
    engine.set_info(_info("actor", ranks[:2]))
    other.remove()
    assert named() == [("m", "e0", "actor", "0", "0.32.0")]


def _info(name: str, ranks: tuple[str, ...]) -> EngineInfo:
    return EngineInfo(
        "id", "0.32.0", ranks, frozenset(), (), EngineState.SERVING, "", "/model", "bridge",
        served_model_name=name,
    )  # fmt: skip


def test_the_age_of_the_served_version(metrics: Metrics) -> None:
    committed = [0]
    metrics.track_served_age(lambda: committed[0])
    get = metrics.registry.get_sample_value
    assert get("weightsync_served_age_seconds", {"model": "m"}) == 0
    committed[0] = time.time_ns() - 60 * 10**9
    age = get("weightsync_served_age_seconds", {"model": "m"})
    assert age is not None
    assert 59 < age < 70
    committed[0] = time.time_ns() + 60 * 10**9
    assert get("weightsync_served_age_seconds", {"model": "m"}) == 0, "a clock that was set back"


async def test_a_scrape(metrics: Metrics, endpoint: MetricsEndpoint) -> None:
    metrics.track("weightsync_slots", "Slots.", lambda: 3)
    head, _, body = (await _ask(endpoint.port)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain")
    assert f"Content-Length: {len(body)}".encode() in head
    families = {family.name for family in text_string_to_metric_families(body.decode())}
    assert {"weightsync_pushes", "weightsync_slots", "weightsync_build_info"} <= families


async def test_openmetrics_for_those_who_ask(endpoint: MetricsEndpoint) -> None:
    answer = await _ask(
        endpoint.port,
        b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text; version=1.0.0\r\n\r\n",
    )
    assert b"application/openmetrics-text" in answer
    assert answer.endswith(b"# EOF\n")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /other HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", b"200"),
        (b"\r\n\r\n", b"405"),
        (b"\xff\xfe\0 \0\r\n\r\n", b"405"),
    ],
)
async def test_other_requests(endpoint: MetricsEndpoint, request_: bytes, status: bytes) -> None:
    answer = await _ask(endpoint.port, request_)
    assert answer.split(b" ")[1] == status
    if b"HEAD" in request_:
        assert answer.endswith(b"\r\n\r\n")


def _of(host: str, path: str = "/metrics") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()


async def test_a_site_that_gives_this_address_a_name_reads_no_metrics(
    endpoint: MetricsEndpoint, caplog: pytest.LogCaptureFixture
) -> None:
    for host in (
        "evil.test",
        "evil.test:9551",
        "127.0.0.1.evil.test",
        "localhost.evil.test",
        "x y",
    ):
        for path in ("/metrics", "/", "/other"):
            answer = await _ask(endpoint.port, _of(host, path))
            assert answer.startswith(b"HTTP/1.1 403 "), host
            assert b"weightsync_" not in answer
            assert b"start it with --host-names NAME" in answer
    # Once for each name, whatever its port, for Prometheus shows no sentence.
    assert caplog.text.count("'evil.test' is its name") == 1
    for number in range(100):
        await _ask(endpoint.port, _of(f"n{number}.evil.test"))
    assert caplog.text.count(" is its name") == 16


async def test_prometheus_may_scrape_by_addresses_and_by_names_of_the_server(
    metrics: Metrics,
) -> None:
    names = KnownHosts(["weightsync-server", "Weights.example.com", ".ws.svc.cluster.local"])
    endpoint = MetricsEndpoint(metrics.registry, "127.0.0.1", 0, names)
    pods = ("10.1.2.3:9551", "[fd00::1]:9551", "localhost:9551", "weightsync-server:9551")
    fully = ("weights.example.com", "WEIGHTS.EXAMPLE.COM.:9551", "pod-0.ws.svc.cluster.local")
    for host in (*pods, *fully, "a.b.ws.svc.cluster.local:9551"):
        assert (await _ask(endpoint.port, _of(host))).startswith(b"HTTP/1.1 200 "), host
    for host in ("ws.svc.cluster.local", "xws.svc.cluster.local", "example.com", "weights"):
        assert (await _ask(endpoint.port, _of(host))).startswith(b"HTTP/1.1 403 "), host
    endpoint.close()


async def test_an_endless_request_is_dropped(endpoint: MetricsEndpoint) -> None:
    with contextlib.suppress(ConnectionError):
        assert await _ask(endpoint.port, b"GET /" + b"a" * 100_000) == b""
    assert b"200 OK" in await _ask(endpoint.port)


@pytest.mark.parametrize("drip", [False, True])
async def test_a_half_sent_request_is_dropped_while_others_are_served(
    endpoint: MetricsEndpoint, monkeypatch: pytest.MonkeyPatch, drip: bool
) -> None:
    monkeypatch.setattr(http_server, "_REQUEST_S", 2.0)
    slow = [await asyncio.open_connection("127.0.0.1", endpoint.port) for _ in range(100)]
    for _, writer in slow:
        writer.write(b"GET /met")
    assert b"200 OK" in await _ask(endpoint.port)
    assert endpoint._clients, "it was answered before the others were dropped"

    async def feed(writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"r")
                await writer.drain()
                await asyncio.sleep(0.1)

    dripping = [asyncio.ensure_future(feed(writer)) for _, writer in slow] if drip else []
    for reader, writer in slow:
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(30):
                assert await reader.read() == b""
        writer.close()
    for task in dripping:
        task.cancel()


async def test_a_port_that_is_taken_is_told(metrics: Metrics, endpoint: MetricsEndpoint) -> None:
    with pytest.raises(OSError):
        MetricsEndpoint(metrics.registry, "127.0.0.1", endpoint.port)


async def test_close_frees_the_port(metrics: Metrics) -> None:
    first = MetricsEndpoint(metrics.registry, "127.0.0.1", 0)
    await asyncio.sleep(0)
    first.close()
    await asyncio.sleep(0.05)
    second = MetricsEndpoint(metrics.registry, "127.0.0.1", first.port)
    assert b"200 OK" in await _ask(second.port)
    second.close()
    await asyncio.sleep(0.05)
