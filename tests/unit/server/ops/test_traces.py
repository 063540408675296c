"""Spans of a push or an apply: below whom, with which phases, and what of too many is dropped."""

from __future__ import annotations

import asyncio
import threading
import time
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

import grpc
import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.support.certificates import Authority
from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync.log_lines import trace_id
from weightsync_server.ops import traces
from weightsync_server.ops.otlp import OtlpSpans
from weightsync_server.ops.traces import TracedPhase, Work

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from opentelemetry.sdk.trace import ReadableSpan

_TRACE, _OTHER, _SPAN = "0af7651916cd43dd8448eb211c80319c", "1" * 32, "b7ad6b7169203331"
_CALLER = f"00-{_TRACE}-{_SPAN}-01"
_END_S = 5.0


class _Site:
    """Spans that are kept in memory."""

    def __init__(self) -> None:
        self.dropped = 0
        self.memory = InMemorySpanExporter()
        self.spans = OtlpSpans({"weightsync.engine": "e"}, self._drop, self.memory)

    def _drop(self, count: int) -> None:
        self.dropped += count

    async def sent(self) -> dict[str, ReadableSpan]:
        await self.spans.close(_END_S)
        return {span.name: span for span in self.memory.get_finished_spans()}


@pytest.fixture
async def site() -> AsyncIterator[_Site]:
    made = _Site()
    yield made
    await made.spans.close(_END_S)


def _parent(span: ReadableSpan) -> str:
    return f"{span.parent.span_id:016x}" if span.parent is not None else ""


def _trace(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.trace_id:032x}"


async def test_phases_and_ranks_lie_below_the_work(site: _Site) -> None:
    work = Work(site.spans, "apply", _CALLER)
    with traces.within(work):
        with traces.phase("apply.prepare", engine="e") as phase:
            assert phase is not None
            phase.add_rank("0/0", 0.25)
            phase.add_rank("0/1", 0.5, "no room")
        with pytest.raises(WeightSyncError), traces.phase("apply.pause"):
            raise WeightSyncError(Reason.ENGINE_AWAY, "it does not answer")
    work.end({"version": 7, "apply_id": "", "engine": None}, "it does not answer")
    found = await site.sent()
    apply, prepare, pause = (found[f"apply{name}"] for name in ("", ".prepare", ".pause"))
    assert (_trace(apply), _parent(apply)) == (_TRACE, _SPAN)
    assert dict(apply.attributes or {}) == {"weightsync.version": 7}
    assert apply.status.description == pause.status.description == "it does not answer"
    assert prepare.context is not None
    ranks = [one for one in site.memory.get_finished_spans() if one.name == "apply.prepare.rank"]
    for rank, seconds in zip(ranks, (0.25, 0.5), strict=True):
        assert rank.parent is not None
        assert rank.parent.span_id == prepare.context.span_id
        assert rank.start_time == prepare.start_time
        assert rank.end_time == (prepare.start_time or 0) + round(seconds * 1e9)
    assert [rank.status.is_ok for rank in ranks] == [True, False]


@pytest.mark.parametrize(
    ("caller", "version", "trace", "linked"),
    [
        (_CALLER, "", _TRACE, []),
        ("", f"00-{_OTHER}-{_SPAN}-01", _OTHER, []),
        (_CALLER, f"00-{_OTHER}-{_SPAN}-01", _OTHER, [_TRACE]),
        (f"00-{_TRACE}-{'2' * 16}-01", _CALLER, _TRACE, []),
    ],
)
async def test_a_work_is_in_the_trace_of_its_version(
    site: _Site, caller: str, version: str, trace: str, linked: list[str]
) -> None:
    work = Work(site.spans, "apply", caller)
    named = work.concern(version)
    assert work.concern(_CALLER) == work.traceparent == named, "it is said once"
    work.end({})
    work.end({"version": 1}, "not again")
    (span,) = (await site.sent()).values()
    assert (_trace(span), trace_id(named)) == (trace, trace)
    assert [f"{link.context.trace_id:032x}" for link in span.links] == linked
    assert not span.attributes
    if caller and not linked:
        assert _parent(span) == caller.split("-")[2], "its caller is nearer than the version"


async def test_a_trace_that_is_not_sampled_is_not_sent(site: _Site) -> None:
    work = Work(site.spans, "push", f"00-{_TRACE}-{_SPAN}-00")
    assert trace_id(work.traceparent) == _TRACE
    assert work.traceparent.endswith("-00")
    with traces.within(work), traces.phase("push.commit"):
        pass
    work.end({})
    assert not await site.sent()


async def test_a_call_without_a_trace_is_in_that_of_what_it_asked_for(site: _Site) -> None:
    codes: list[grpc.StatusCode] = []

    def call(header: str, code: grpc.StatusCode) -> Any:
        def serve() -> str:
            traces.take_over(header)
            end = traces.timed_call(site.spans, "s", f"M{code.value[0]}", codes.append)
            # As an apply, in a task of its own.
            copy_context().run(work.join)
            end(code)
            return traces.caller()

        return copy_context().run(serve)

    work = Work(site.spans, "apply", "")
    named = work.traceparent
    assert call("", grpc.StatusCode.OK) == named
    assert call(_CALLER, grpc.StatusCode.NOT_FOUND) == _CALLER
    call(_CALLER, grpc.StatusCode.INTERNAL)
    found = await site.sent()
    ok, refused, fault = (found[f"s/M{code}"] for code in (0, 5, 13))
    assert (_trace(ok), _parent(ok)) == (trace_id(named), named.split("-")[2])
    assert (_trace(refused), _parent(refused)) == (_TRACE, _SPAN)
    assert (refused.attributes or {})["rpc.grpc.status_code"] == 5
    assert refused.status.is_ok
    assert not fault.status.is_ok
    assert len(codes) == 3


def test_nothing_is_measured_without_a_work() -> None:
    assert traces.current() is None
    with traces.phase("apply.pause", engine="e") as phase:
        assert phase is None
    with traces.within(None):
        assert traces.current() is None


async def test_no_span_ends_before_it_began(site: _Site, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([9_000, 5_000, 4_000, 3_000])
    monkeypatch.setattr(clock, "wall_ns", lambda: next(now))
    work = Work(site.spans, "apply", "")
    with traces.within(work), traces.phase("apply.pause"):
        pass
    work.end({})
    for span in (await site.sent()).values():
        assert span.start_time == span.end_time


async def test_what_is_too_much_for_a_span_is_left_out(site: _Site) -> None:
    work = Work(site.spans, "apply", "")
    for _ in range(5000):
        work.add(TracedPhase("apply.prepare", 1, 2))
    work.end({}, "x" * 9000)
    found = await site.sent()
    assert len(found["apply"].status.description or "") <= 500
    waiting = len(site.memory.get_finished_spans()) + site.dropped
    assert waiting == 4096 + 1


class _Stuck(SpanExporter):
    """Takes spans when it is let; `shutdown` breaks it off."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.asked = threading.Event()
        self.threads: set[threading.Thread] = set()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked.set()
        self.threads.add(threading.current_thread())
        if threading.current_thread() is threading.main_thread():
            # Whose work is not to be held up: the test says so.
            return SpanExportResult.FAILURE
        self.free.wait(60)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.free.set()


async def test_a_collector_that_is_stuck_holds_up_nothing_and_the_end_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("MAX_QUEUE_SIZE", 8), ("MAX_EXPORT_BATCH_SIZE", 4)):
        monkeypatch.setenv(f"OTEL_BSP_{name}", str(value))
    stuck, dropped = _Stuck(), list[int]()
    spans = OtlpSpans({}, dropped.append, stuck)
    for _ in range(4):
        Work(spans, "push", "").end({})
    assert await asyncio.to_thread(stuck.asked.wait, 60)
    for _ in range(20):
        Work(spans, "push", "").end({})
    assert sum(dropped) == 12, "four are being sent, and eight wait"
    assert threading.main_thread() not in stuck.threads, "a push does not send by itself"
    begun = time.monotonic()
    await spans.close(1.0)
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "x"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "x"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "many"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "9" * 30),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "-1"),
        ("OTEL_BSP_SCHEDULE_DELAY", "1.5"),
    ],
)
def test_wrong_variables_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(WeightSyncError, match=f"set OpenTelemetry's variables.*{name}") as caught:
        OtlpSpans({}, lambda _: None)
    assert caught.value.reason is Reason.REQUEST_INVALID


_OTLP = "OTEL_EXPORTER_OTLP_"


def _refused(monkeypatch: pytest.MonkeyPatch, **variables: object) -> str:
    """Return with which sentence variables are refused."""
    with monkeypatch.context() as environment:
        for name, value in variables.items():
            environment.setenv(f"{_OTLP}{name}", str(value))
        with pytest.raises(WeightSyncError) as caught:
            OtlpSpans({}, lambda _: None)
    assert caught.value.reason is Reason.REQUEST_INVALID
    return caught.value.message


def test_files_for_tls_that_cannot_be_used_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours, nothing, garbage = Authority(tmp_path), tmp_path / "nothing", tmp_path / "garbage"
    pair, other = ours.sign("collector.test"), ours.sign("other.test")
    garbage.write_text("no certificate")
    for name in ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE"):
        for kind in (name, f"TRACES_{name}"):
            said = _refused(monkeypatch, **{kind: nothing})
            assert f"{_OTLP}{kind} names '{nothing}', which cannot be read (No such file" in said
    said = _refused(monkeypatch, TRACES_CERTIFICATE=garbage, CERTIFICATE=ours.ca)
    assert f"{_OTLP}TRACES_CERTIFICATE names '{garbage}', which holds no PEM certificate" in said
    said = _refused(monkeypatch, CLIENT_KEY=pair.key)
    assert f"{_OTLP}CLIENT_KEY names a key, and {_OTLP}CLIENT_CERTIFICATE no certificate" in said
    for key in ({"CLIENT_KEY": other.key}, {}):
        said = _refused(monkeypatch, CLIENT_CERTIFICATE=pair.certificate, **key)
        assert f"{_OTLP}CLIENT_CERTIFICATE names '{pair.certificate}'" in said
        assert "are not a PEM certificate with its key" in said


async def test_files_for_tls_that_can_be_used_are_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours = Authority(tmp_path)
    pair = ours.sign("collector.test")
    files = {"CERTIFICATE": ours.ca, "CLIENT_CERTIFICATE": pair.certificate}
    for name, path in (files | {"CLIENT_KEY": pair.key}).items():
        monkeypatch.setenv(f"{_OTLP}{name}", str(path))
    monkeypatch.setenv(f"{_OTLP}ENDPOINT", "https://127.0.0.1:1")
    await OtlpSpans({}, lambda _: None).close(0.1)


async def test_as_few_spans_may_wait_as_its_variable_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")
    site = _Site()
    Work(site.spans, "push", "").end({})
    assert await site.sent()


async def test_variables_of_the_server_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    site = _Site()
    Work(site.spans, "push", "").end({})
    (span,) = (await site.sent()).values()
    assert span.resource.attributes["service.name"] == "mine"
    assert span.resource.attributes["weightsync.engine"] == "e"


async def test_a_disabled_sdk_makes_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    site = _Site()
    work = Work(site.spans, "push", "")
    traces.take_over(_CALLER)
    assert work.traceparent == ""
    assert traces.caller() == _CALLER
    work.end({"version": 1})
    assert not await site.sent()
