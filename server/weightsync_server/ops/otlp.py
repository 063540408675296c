"""SpanMaker by OpenTelemetry, sent to an OTLP collector; imported only where traces are on."""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.environment_variables import (
    OTEL_BSP_MAX_EXPORT_BATCH_SIZE,
    OTEL_BSP_MAX_QUEUE_SIZE,
    OTEL_BSP_SCHEDULE_DELAY,
    OTEL_EXPORTER_OTLP_CERTIFICATE,
    OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE,
    OTEL_EXPORTER_OTLP_CLIENT_KEY,
    OTEL_EXPORTER_OTLP_ENDPOINT,
    OTEL_EXPORTER_OTLP_PROTOCOL,
    OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE,
    OTEL_EXPORTER_OTLP_TRACES_CLIENT_CERTIFICATE,
    OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY,
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT,
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL,
)
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Link, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from weightsync import __version__
from weightsync.errors import Reason, WeightSyncError
from weightsync.log_lines import event
from weightsync_server.ops.tasks import in_thread
from weightsync_server.ops.traces import TracedPhase, refusing_variables

logger = logging.getLogger(__name__)

#: What the libraries say of a collector that is away, each time; `_Exporter` says it once.
_TALKATIVE = ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal")
#: Spans that wait to be sent, those in one sending, and milliseconds between two, as OpenTelemetry
#: has it where its variables are not set.
_QUEUE, _BATCH, _DELAY_MS = 2048, 512, 5000
#: Variables that name files in PEM: the one for traces alone, and the one for all.
_CA = (OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE, OTEL_EXPORTER_OTLP_CERTIFICATE)
_CERTIFICATE = (OTEL_EXPORTER_OTLP_TRACES_CLIENT_CERTIFICATE, OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE)
_KEY = (OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY, OTEL_EXPORTER_OTLP_CLIENT_KEY)
#: Attributes that are not ours alone keep their names.
_COMMON = ("rpc.",)

_propagator = TraceContextTextMapPropagator()


class OtlpSpans:
    """Makes spans at once and sends them from a thread, or drops them, and counts that.

    Where to, which, and how many may wait is said by OpenTelemetry's own variables. `facts` are
    attributes of this server. `exporter` takes the place of the one that those variables name.

    Raises:
        WeightSyncError: REQUEST_INVALID; a variable is wrong.
    """

    def __init__(
        self,
        facts: Mapping[str, str],
        on_drop: Callable[[int], None],
        exporter: SpanExporter | None = None,
    ) -> None:
        for name in _TALKATIVE:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        with refusing_variables():
            _check_files()
            self._exporter = _Exporter(exporter or _made_exporter(), on_drop)
            processor = _BoundedProcessor(self._exporter, on_drop)
            # Not at the exit of the process, which would wait for a collector that is away.
            self._provider = TracerProvider(resource=_resource(facts), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("weightsync", __version__)

    def begin(self, name: str, began_ns: int, parent: str, links: Sequence[str] = ()) -> OtlpSpan:
        found = [trace.get_current_span(_context(link)).get_span_context() for link in links]
        span = self._tracer.start_span(
            name, _context(parent), links=[Link(one) for one in found], start_time=began_ns
        )
        return OtlpSpan(self._tracer, span)

    def add_call(self, phase: TracedPhase, parent: str) -> None:
        span = self._tracer.start_span(
            phase.name, _context(parent), kind=SpanKind.SERVER, start_time=phase.began_ns
        )
        _end(span, phase)

    async def close(self, longest_s: float) -> None:
        """Send what is left, for so many seconds at most."""
        await in_thread(self._close, longest_s)

    def _close(self, longest_s: float) -> None:
        ending = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        ending.start()
        ending.join(longest_s)
        # What is under way is broken off, and what waits is not sent any more. That may take as
        # long as what is sent, and nobody waits for it.
        threading.Thread(target=self._exporter.stop, name="spans", daemon=True).start()


class OtlpSpan:
    """One that has begun; its children are made when it ends."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer, self._span = tracer, span

    @property
    def traceparent(self) -> str:
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, trace.set_span_in_context(self._span, Context()))
        # Not there where OTEL_SDK_DISABLED is set.
        return carrier.get("traceparent", "")

    def end(self, phase: TracedPhase) -> None:
        self._add_parts(self._span, phase)
        _end(self._span, phase)

    def _add_parts(self, span: trace.Span, phase: TracedPhase) -> None:
        if not span.is_recording():
            return
        above = trace.set_span_in_context(span, Context())
        for part in phase.parts:
            made = self._tracer.start_span(part.name, above, start_time=part.began_ns)
            self._add_parts(made, part)
            _end(made, part)


class _BoundedProcessor(BatchSpanProcessor):
    """Drops spans, and counts them, while as many wait as may."""

    def __init__(self, exporter: _Exporter, on_drop: Callable[[int], None]) -> None:
        most = _count(OTEL_BSP_MAX_QUEUE_SIZE, _QUEUE)
        # No more are sent at once than may wait, which OpenTelemetry would refuse.
        batch = min(most, _count(OTEL_BSP_MAX_EXPORT_BATCH_SIZE, _BATCH))
        delay_ms = _count(OTEL_BSP_SCHEDULE_DELAY, _DELAY_MS)
        super().__init__(exporter, most, delay_ms, batch)
        self._most, self._given, self._on_drop = most, 0, on_drop
        self._taker = exporter

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        if context is None or not context.trace_flags.sampled:
            return
        if self._given - self._taker.taken >= self._most:
            self._on_drop(1)
            return
        self._given += 1
        super().on_end(span)


class _Exporter(SpanExporter):
    """Counts what a collector does not take, and logs when that begins and ends."""

    def __init__(self, exporter: SpanExporter, on_drop: Callable[[int], None]) -> None:
        self._exporter, self._on_drop = exporter, on_drop
        self._away = self._stopped = False
        #: Spans that it was given.
        self.taken = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken += len(spans)
        try:
            result = self._exporter.export(spans)
        except Exception:  # noqa: BLE001 - whatever it is, the spans are lost, and that is logged
            result = SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            if self._away:
                logger.info("the collector takes spans again", extra=event("traces.sent"))
            self._away = False
            return result
        self._on_drop(len(spans))
        if not self._away:
            logger.warning(
                "start the OTLP collector at %s, or set %s (and %s, where it has TLS): it took no "
                "spans, which are dropped until it does; pushes and applies go on",
                _endpoint(),
                OTEL_EXPORTER_OTLP_ENDPOINT,
                OTEL_EXPORTER_OTLP_CERTIFICATE,
                extra=event("traces.dropped"),
            )
        self._away = True
        return result

    def shutdown(self) -> None:
        self.stop()

    def stop(self) -> None:
        """Break off what is being sent."""
        if not self._stopped:
            self._stopped = True
            self._exporter.shutdown()


def _context(traceparent: str) -> Context:
    # Never that of the task: what it serves is named.
    return _propagator.extract({"traceparent": traceparent}, Context())


def _end(span: trace.Span, phase: TracedPhase) -> None:
    if span.is_recording():
        span.set_attributes(
            {
                name if name.startswith(_COMMON) else f"weightsync.{name}": value
                for name, value in phase.facts.items()
                if value not in (None, "")
            }
        )
        if phase.error:
            span.set_status(Status(StatusCode.ERROR, phase.error))
    # The clock may have been put back meanwhile.
    span.end(max(phase.began_ns, phase.ended_ns))


def _resource(facts: Mapping[str, str]) -> Resource:
    """Return what this server is, where OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win."""
    given = OTELResourceDetector().detect().attributes
    own = {"service.name": "weightsync-server", "service.version": __version__, **facts}
    return Resource.create({name: value for name, value in own.items() if name not in given})


def _count(name: str, default: int) -> int:
    value = os.environ.get(name, "").strip() or str(default)
    if not (value.isascii() and value.isdecimal() and 0 < int(value[:20]) < 1 << 31):
        msg = f"{name} is {value[:64]!r}, and must be a whole number from 1 to 2147483647"
        raise ValueError(msg)
    return int(value)


def _check_files() -> None:
    """Refuse files that are named for TLS and cannot be used: OpenTelemetry goes on without them.

    Raises ValueError.
    """
    for name in (*_CA, *_CERTIFICATE, *_KEY):
        if path := os.environ.get(name, ""):
            try:
                Path(path).read_bytes()
            except OSError as error:
                msg = f"{name} names {path!r}, which cannot be read ({error.strerror})"
                raise ValueError(msg) from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    name, authority = _first_set(_CA)
    if authority:
        try:
            context.load_verify_locations(authority)
        except OSError:
            msg = f"{name} names {authority!r}, which holds no PEM certificate"
            raise ValueError(msg) from None
    (named, certificate), (key_name, key) = _first_set(_CERTIFICATE), _first_set(_KEY)
    if key and not certificate:
        msg = f"{key_name} names a key, and {OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE} no certificate"
        raise ValueError(msg)
    if certificate:
        try:
            # The password keeps OpenSSL from asking for one at the terminal.
            context.load_cert_chain(certificate, key or None, password="")
        except OSError:
            keyed = f"{key_name} the key {key!r}" if key else "no key is named beside it"
            msg = (
                f"{named} names {certificate!r} and {keyed}, which are not a PEM certificate with "
                "its key, without a password"
            )
            raise ValueError(msg) from None


def _first_set(names: Sequence[str]) -> tuple[str, str]:
    """Return the first variable that is set, and what it says; the last one and "": none is."""
    return next(((name, path) for name in names if (path := os.environ.get(name))), (names[-1], ""))


def _endpoint() -> str:
    return (
        os.environ.get(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT)
        or os.environ.get(OTEL_EXPORTER_OTLP_ENDPOINT)
        or "http://localhost:4317"
    )


def _made_exporter() -> SpanExporter:
    protocol = (
        os.environ.get(OTEL_EXPORTER_OTLP_TRACES_PROTOCOL)
        or os.environ.get(OTEL_EXPORTER_OTLP_PROTOCOL)
        or "grpc"
    )
    made: Any
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as made
    elif protocol == "http/protobuf":
        try:
            from opentelemetry.exporter.otlp.proto.http import trace_exporter as made
        except ModuleNotFoundError:
            raise WeightSyncError(
                Reason.NOT_SUPPORTED,
                "run `pip install opentelemetry-exporter-otlp-proto-http`: "
                f"{OTEL_EXPORTER_OTLP_PROTOCOL}={protocol} needs it; or leave that out for gRPC",
            ) from None
    else:
        msg = f"{OTEL_EXPORTER_OTLP_PROTOCOL} is {protocol!r}, and may be grpc or http/protobuf"
        raise ValueError(msg)
    exporter: SpanExporter = made.OTLPSpanExporter()
    return exporter
