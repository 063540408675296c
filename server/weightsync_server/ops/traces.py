"""The way of a version as spans: what is measured of it is kept, and becomes spans at its end.

Nothing here needs OpenTelemetry: `otlp` has it, and is imported only where traces are on. Where
they are off there is no work under way, and each phase costs one look for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync.log_lines import note, trace_id, traceparent

#: Phases and ranks of one push or apply that become spans; the rest is left out.
_MOST_PHASES = 4096
#: Characters of an error on a span.
_MOST_ERROR = 500
#: Statuses that are the server's fault, by OpenTelemetry's conventions for RPC servers.
_FAULTS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)


@dataclass(slots=True)
class TracedPhase:
    """What took place from `began_ns` to `ended_ns`, Unix time; `error` says why it failed."""

    name: str
    began_ns: int
    ended_ns: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    parts: list[TracedPhase] = field(default_factory=list)

    def add_rank(self, rank: str, seconds: float, error: str = "") -> None:
        """Add how long one rank took of it, which began with all others."""
        name, ended_ns = f"{self.name}.rank", self.began_ns + round(seconds * 1e9)
        self.parts.append(TracedPhase(name, self.began_ns, ended_ns, {"rank": rank}, error))


class OpenSpan(Protocol):
    """A span that has begun."""

    @property
    def traceparent(self) -> str:
        """What names it to others, as W3C Trace Context writes it."""

    def end(self, phase: TracedPhase) -> None:
        """End it with what the phase says, and make a span of each of its parts."""


class SpanMaker(Protocol):
    """Makes spans and has them sent; returns at once, and never raises."""

    def begin(self, name: str, began_ns: int, parent: str, links: Sequence[str] = ()) -> OpenSpan:
        """Begin a span below the one that `parent` names, as a traceparent; "": a new trace."""

    def add_call(self, phase: TracedPhase, parent: str) -> None:
        """Make the span of a call that this server has answered."""


class _Call:
    """The call that a task serves; `parent` is the span that it belongs below, "": not known."""

    __slots__ = ("parent",)

    def __init__(self, parent: str) -> None:
        self.parent = parent


_call: ContextVar[_Call | None] = ContextVar("weightsync_traced_call", default=None)
_work: ContextVar[Work | None] = ContextVar("weightsync_traced_work", default=None)


@contextlib.contextmanager
def refusing_variables() -> Iterator[None]:
    """Refuse as REQUEST_INVALID what OpenTelemetry raises for its variables, also when imported."""
    try:
        yield
    except (WeightSyncError, ImportError):
        raise
    except Exception as error:
        # Not all that its exporters raise is a ValueError.
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            f"set OpenTelemetry's variables (OTEL_...) right, or leave out --traces: {error}",
        ) from error


def take_over(header: str) -> None:
    """Have this task, and those that it starts, serve a call with this `traceparent` header."""
    parent = traceparent(header)
    note(trace_id=trace_id(parent))
    _call.set(_Call(parent))


def caller() -> str:
    """Return the traceparent of the call that this task serves; "": it has none."""
    call = _call.get()
    return call.parent if call is not None else ""


class Work:
    """A push or an apply under way.

    Its span begins below that of the version that it `concerns`, else below its caller's.
    """

    def __init__(self, spans: SpanMaker, name: str, caller: str) -> None:
        self._spans, self._caller = spans, caller
        self._span: OpenSpan | None = None
        self._named = self._above = ""
        self._whole = TracedPhase(name, clock.wall_ns())
        self._count = 0

    @property
    def traceparent(self) -> str:
        """What names its span, which has begun then."""
        return self.concern("")

    def concern(self, parent: str) -> str:
        """Begin its span in the trace that `parent` names, once, and return what names it.

        A caller in another trace is linked. Lines that this task logs have the trace's id.
        """
        if self._span is None:
            links, mine = list[str](), self._caller
            if mine and trace_id(parent or mine) == trace_id(mine):
                parent = mine
            elif mine:
                links = [mine]
            self._span = self._spans.begin(self._whole.name, self._whole.began_ns, parent, links)
            self._named, self._above = self._span.traceparent, parent
        self.join()
        return self._named

    def join(self) -> None:
        """Have the call that this task serves belong to it, unless its caller said where to."""
        if not self._named:
            # It has not begun, or OpenTelemetry is switched off.
            return
        call = _call.get()
        if call is not None and not call.parent:
            call.parent = self._named
        note(trace_id=trace_id(self._named))

    def drop(self) -> None:
        """Have no span after all; the call that has joined it lies where it would have."""
        call = _call.get()
        if call is not None and self._named and call.parent == self._named:
            call.parent = self._above

    def add(self, phase: TracedPhase) -> None:
        self._count += 1 + len(phase.parts)
        if self._count <= _MOST_PHASES:
            self._whole.parts.append(phase)

    def end(self, facts: Mapping[str, Any], error: str = "") -> None:
        """End its span, with one for each phase; once."""
        self.concern("")
        whole, span = self._whole, self._span
        if span is None or whole.ended_ns:
            return
        whole.ended_ns, whole.error = clock.wall_ns(), error[:_MOST_ERROR]
        whole.facts.update(facts)
        span.end(whole)


@contextlib.contextmanager
def within(work: Work | None) -> Iterator[None]:
    """Have phases that this task, and those that it starts, go through be phases of a work."""
    if work is None:
        yield
        return
    before = _work.set(work)
    try:
        yield
    finally:
        _work.reset(before)


def current() -> Work | None:
    """Return the work of this task; None: it has none, or traces are off."""
    return _work.get()


@contextlib.contextmanager
def phase(name: str, **facts: Any) -> Iterator[TracedPhase | None]:
    """Measure a phase of the work of this task, also one that fails; None: nobody asks."""
    work = _work.get()
    if work is None:
        yield None
        return
    found = TracedPhase(name, clock.wall_ns(), facts=facts)
    try:
        yield found
    except BaseException as error:
        why = error.message if isinstance(error, WeightSyncError) else str(error)
        found.error = (why or type(error).__name__)[:_MOST_ERROR]
        raise
    finally:
        found.ended_ns = clock.wall_ns()
        work.add(found)


def ended(name: str, seconds: float, ago_s: float = 0.0, **facts: Any) -> TracedPhase:
    """Return a phase that took so many seconds and has ended, some time ago."""
    ended_ns = clock.wall_ns() - round(ago_s * 1e9)
    return TracedPhase(name, ended_ns - round(seconds * 1e9), ended_ns, facts)


def timed_call(
    spans: SpanMaker, service: str, method: str, end: Callable[[grpc.StatusCode], None]
) -> Callable[[grpc.StatusCode], None]:
    """Return what calls `end`, and makes a span of the call from now until then."""
    began_ns = clock.wall_ns()

    def ended_with(code: grpc.StatusCode) -> None:
        end(code)
        facts = {
            "rpc.system": "grpc",
            "rpc.service": service,
            "rpc.method": method,
            "rpc.grpc.status_code": code.value[0],
        }
        error = code.name if code in _FAULTS else ""
        call = TracedPhase(f"{service}/{method}", began_ns, clock.wall_ns(), facts, error)
        parent = caller()
        # It may be known only now, and the line of the audit comes after this.
        note(trace_id=trace_id(parent))
        spans.add_call(call, parent)

    return ended_with
