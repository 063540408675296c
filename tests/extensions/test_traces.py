"""Traces of real servers, as a collector in another process gets them; and without a collector."""

from __future__ import annotations

import contextlib
import json
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("opentelemetry.sdk")

import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from safetensors.torch import save_file

from tests.support.scraped import scraped
from tests.support.traced import Collector, Span, children, named
from tests.support.weightsync_server import WeightSyncServer
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import Client

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(180)

_RPC = "weightsync.v1.WeightSync"
_TRACE, _SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
_OTHER = "11f7651916cd43dd8448eb211c80319c"
#: What a server may take to end: calls have ended, and the last spans are waited for 2 s.
_END_S = 12.0


def _tensors(seed: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((64, 33), float(seed), dtype=torch.bfloat16), "b": torch.zeros(5)}


def _server(folder: Path, variables: dict[str, str], *flags: str) -> WeightSyncServer:
    model = folder / "model.safetensors"
    save_file(_tensors(1), model)
    given = ["--engine=memory", f"--model={model}", "--ranks=2", "--name=policy", "--traces"]
    given += ["--log-format=json", *flags]
    return WeightSyncServer(folder / "run", folder / "state", flags=given, variables=variables)


@contextlib.contextmanager
def _serving(server: WeightSyncServer) -> Iterator[Client]:
    server.start()
    server.wait_serving()
    try:
        with Client(server.address, model="policy") as client:
            yield client
    finally:
        assert server.stop() == 0, server.log


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="wst") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def collector(folder: Path) -> Iterator[Collector]:
    with Collector(folder / "spans.jsonl") as made:
        yield made


@pytest.fixture(scope="module")
def server(folder: Path, collector: Collector) -> WeightSyncServer:
    variables = {**collector.variables, "OTEL_RESOURCE_ATTRIBUTES": "deployment=test"}
    return _server(folder, variables)


@pytest.fixture(scope="module")
def client(server: WeightSyncServer) -> Iterator[Client]:
    with _serving(server) as made:
        yield made


@contextlib.contextmanager
def _training() -> Iterator[str]:
    """Be in a span of a trainer that uses OpenTelemetry; yields the trace's id."""
    with TracerProvider().get_tracer("trainer").start_as_current_span("step") as span:
        yield trace.format_trace_id(span.get_span_context().trace_id)


def _ended(*names: str) -> Any:
    return lambda spans: set(names) <= {span["name"] for span in spans}


_WHOLE = _ended("push", "apply", f"{_RPC}/CommitPush", f"{_RPC}/ApplyVersion")


def _logged(server: WeightSyncServer, event: str, trace_id: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in server.log.splitlines()]
    return [one for one in lines if (one["event"], one.get("trace_id")) == (event, trace_id)]


def test_a_version_is_one_trace_from_the_push_to_both_ranks(
    client: Client, server: WeightSyncServer, collector: Collector
) -> None:
    with _training() as trace_id:
        version = client.push(_tensors(2)).version
    # By somebody who is in no span.
    report = client.apply(version)
    spans = collector.trace(trace_id, _WHOLE)
    (push,), (apply,) = named(spans, "push"), named(spans, "apply")
    assert apply["parent"] == push["span_id"]
    assert {"push.receive", "push.commit", "apply"} <= set(children(spans, push))
    phases = ["stage", "prepare", "pause", "commit", "verify", "resume"]
    (call,) = named(spans, f"{_RPC}/ApplyVersion")
    below = [span for span in spans if span["parent"] == apply["span_id"] and span is not call]
    assert [one["name"] for one in below] == [f"apply.{phase}" for phase in phases]
    for one in below:
        assert one["attributes"]["weightsync.engine"] == "memory"
        assert apply["began_ns"] <= one["began_ns"] <= one["ended_ns"] <= apply["ended_ns"]
    for phase in ("prepare", "commit", "verify"):
        (above,) = named(spans, f"apply.{phase}")
        ranks = named(spans, f"apply.{phase}.rank")
        assert {one["parent"] for one in ranks} == {above["span_id"]}
        found = sorted(one["attributes"]["weightsync.rank"] for one in ranks)
        assert found == sorted(rank.rank for rank in report.ranks)
    assert apply["attributes"]["weightsync.apply_id"] == report.apply_id
    assert apply["attributes"]["weightsync.result"] == "applied"
    assert int(apply["attributes"]["weightsync.version"]) == version
    assert _logged(server, "apply.done", trace_id), "the log names the same trace"
    assert len(_logged(server, "audit.call", trace_id)) >= 4, "and so does the audit"


def test_a_call_for_what_is_live_lies_below_the_push(client: Client, collector: Collector) -> None:
    with _training() as trace_id:
        version = client.push(_tensors(12)).version
    for _ in range(3):
        client.apply(version)

    def whole(spans: list[Span]) -> bool:
        return _WHOLE(spans) and len(named(spans, f"{_RPC}/ApplyVersion")) == 3

    spans = collector.trace(trace_id, whole)
    # One that began as a delta and went on in full is the last of two.
    push, (apply,) = named(spans, "push")[-1], named(spans, "apply")
    first, *others = named(spans, f"{_RPC}/ApplyVersion")
    assert first["parent"] == apply["span_id"]
    assert [one["parent"] for one in others] == [push["span_id"]] * 2, "there is no other apply"


def test_calls_have_the_attributes_of_rpcs_and_the_server_its_own(
    client: Client, collector: Collector
) -> None:
    with _training() as trace_id:
        client.push(_tensors(3))
    spans = collector.trace(trace_id, _ended("push", f"{_RPC}/CommitPush"))
    (call,) = named(spans, f"{_RPC}/PushWeights")
    assert call["kind"] == 2, "a span of a server"
    assert call["attributes"] == {
        "rpc.system": "grpc",
        "rpc.service": _RPC,
        "rpc.method": "PushWeights",
        "rpc.grpc.status_code": 0,
    }
    resource = call["resource"]
    assert resource["service.name"] == "weightsync-server"
    assert resource["gen_ai.request.model"] == "policy"
    assert resource["weightsync.engine"] == "memory"
    assert resource["deployment"] == "test"


def test_a_traceparent_is_taken_over_and_another_one_linked(
    client: Client, server: WeightSyncServer, collector: Collector
) -> None:
    with _training() as trace_id:
        version = client.push(_tensors(4)).version
    server.stub.ApplyVersion(
        pb.ApplyVersionRequest(model="policy", version=version),
        timeout=60,
        metadata=(("traceparent", f"00-{_OTHER}-{_SPAN}-01"),),
    )
    (apply,) = named(collector.trace(trace_id, _ended("apply")), "apply")
    assert apply["links"] == [_OTHER]
    (call,) = collector.trace(_OTHER, _ended(f"{_RPC}/ApplyVersion"))
    assert call["parent"] == _SPAN


def test_what_is_refused_says_why(
    client: Client, server: WeightSyncServer, collector: Collector
) -> None:
    with pytest.raises(Exception, match="no version 999"):
        server.stub.ApplyVersion(
            pb.ApplyVersionRequest(model="policy", version=999),
            timeout=60,
            metadata=(("traceparent", f"00-{_TRACE}-{_SPAN}-01"),),
        )
    spans = collector.trace(_TRACE, _ended("apply", f"{_RPC}/ApplyVersion"))
    (apply,) = named(spans, "apply")
    assert apply["failed"]
    assert "999" in apply["message"]
    assert apply["attributes"]["weightsync.error_reason"] == "VERSION_UNKNOWN"
    (call,) = named(spans, f"{_RPC}/ApplyVersion")
    assert call["attributes"]["rpc.grpc.status_code"] == 5
    assert not call["failed"], "the caller's mistake is none of the server"


@pytest.mark.parametrize(
    "header",
    ["", "nonsense", f"00-{_TRACE}-{'0' * 16}-01", f"00-{'0' * 32}-{_SPAN}-01", "00-" + "f" * 4000],
)
def test_a_header_that_names_no_trace_begins_one(
    client: Client, server: WeightSyncServer, collector: Collector, header: str
) -> None:
    before = collector.traces
    version = client.push(_tensors(5)).version
    server.stub.ApplyVersion(
        pb.ApplyVersionRequest(model="policy", version=version),
        timeout=60,
        metadata=(("traceparent", header),),
    )
    assert collector.new_trace(before, _WHOLE) != _TRACE


def test_a_version_is_in_its_trace_also_after_a_restart(
    client: Client, server: WeightSyncServer, collector: Collector
) -> None:
    with _training() as trace_id:
        version = client.push(_tensors(6)).version
    collector.trace(trace_id, _ended("push"))
    assert server.stop() == 0
    server.start()
    server.wait_serving()
    client.apply(version)
    spans = collector.trace(trace_id, _ended("push", "apply"))
    assert named(spans, "apply")[0]["parent"] == named(spans, "push")[0]["span_id"]


def test_a_push_is_one_trace_also_over_a_restart(
    client: Client, server: WeightSyncServer, collector: Collector
) -> None:
    # Of a client that names no trace.
    begin = pb.BeginPushRequest(model="policy", total_bytes=10, shard_count=1)
    before = collector.traces
    push = server.stub.BeginPush(begin, timeout=60)
    assert server.stop() == 0
    trace_id = collector.new_trace(before, _ended("push", f"{_RPC}/BeginPush"))
    server.start()
    server.wait_serving()
    server.stub.AbortPush(pb.AbortPushRequest(push_id=push.push_id), timeout=60)
    spans = collector.trace(trace_id, _ended(f"{_RPC}/AbortPush"))
    first, second = named(spans, "push")
    assert second["parent"] == first["span_id"]


def test_ingest_processes_pass_the_trace_on(folder: Path, collector: Collector) -> None:
    home = folder / "i"
    home.mkdir()
    server = _server(home, collector.variables, "--ingest=1")
    with _serving(server) as client, _training() as trace_id:
        client.push(_tensors(7))
        spans = collector.trace(trace_id, _ended("push", f"{_RPC}/CommitPush"))
        assert named(spans, f"{_RPC}/PushWeights")
        assert any(
            line["method"] == "PushWeights" for line in _logged(server, "audit.call", trace_id)
        )


class _SilentCollector:
    """Takes connections, and never answers."""

    def __enter__(self) -> int:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._taken: list[socket.socket] = []
        threading.Thread(target=self._take, daemon=True).start()
        return int(self._socket.getsockname()[1])

    def _take(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._taken.append(self._socket.accept()[0])

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        for one in self._taken:
            one.close()


@pytest.mark.parametrize("silent", [False, True], ids=["away", "silent"])
def test_without_a_collector_all_goes_on_and_what_is_lost_is_counted(
    folder: Path, silent: bool
) -> None:
    home = folder / f"{silent:d}"
    home.mkdir()
    with contextlib.ExitStack() as stack:
        if silent:
            port = stack.enter_context(_SilentCollector())
        else:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "30",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
            "OTEL_BSP_MAX_QUEUE_SIZE": "16",
            "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "8",
        }
        server = _server(home, variables)
        server.start()
        server.wait_serving()
        with Client(server.address, model="policy") as client:
            begun = time.monotonic()
            for seed in range(3):
                client.apply(client.push(_tensors(10 + seed)).version)
            # One export alone may wait for 30 s.
            assert time.monotonic() - begun < 30
        said = [json.loads(line)["message"] for line in server.log.splitlines()]
        assert scraped("\n".join(said), "weightsync_dropped_spans_total") > 0
        begun = time.monotonic()
        assert server.stop() == 0, server.log
        assert time.monotonic() - begun < _END_S
        lines = [json.loads(line) for line in server.log.splitlines()]
        assert sum(one["event"] == "traces.dropped" for one in lines) <= 1
        assert not [one for one in lines if one["logger"].startswith("opentelemetry")]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier-pigeon", "PROTOCOL is 'carrier-pigeon'"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/no/ca.pem", "CERTIFICATE names '/no/ca.pem', which"),
        # OpenTelemetry reads it when it is imported.
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "abc", "COUNT_LIMIT must be .* but got abc"),
    ],
)
def test_wrong_variables_are_one_sentence_at_the_start(
    folder: Path, name: str, value: str, said: str
) -> None:
    home = folder / name[-5:]
    home.mkdir()
    server = _server(home, {name: value})
    with pytest.raises(RuntimeError, match=said):
        server.start()
    assert "Traceback" not in server.log


def test_no_span_is_made_without_the_flag(folder: Path, collector: Collector) -> None:
    home = folder / "off"
    home.mkdir()
    server = _server(home, collector.variables, "--no-traces")
    before = len(collector.spans)
    with _serving(server) as client, _training() as trace_id:
        client.apply(client.push(_tensors(8)).version)
        assert _logged(server, "apply.done", trace_id), "the log names it all the same"
    assert not [span for span in collector.spans[before:] if span["trace_id"] == trace_id]
