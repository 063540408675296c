"""One line per call that may change state, and the proof that none went without."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import inspect
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import Message

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync.log_lines import event
from weightsync_server.auth.caller import Caller, RejectedCall, UseCase
from weightsync_server.auth.roles import RULES, Role

if TYPE_CHECKING:
    from weightsync_server.auth.admission import Auditor
    from weightsync_server.ops.metrics import Metrics


logger = logging.getLogger("weightsync.audit")

#: Seconds from a line about calls that prove nobody's authority to the next: they may be many.
_STRANGERS_S = 60.0


class Audit:
    """Writes audit lines and counts them beside the calls that changed something.

    `weightsync_state_calls_total` and `weightsync_audit_lines_total` are equal while no call is
    under way.
    """

    def __init__(self, model: str, metrics: Metrics) -> None:
        self._model = model
        self._metrics = metrics
        self._calls = metrics.counter(
            "weightsync_state_calls_total", "Calls that reached a method which changes state."
        )
        self._lines = metrics.counter("weightsync_audit_lines_total", "Audit lines of such calls.")
        self._refused = metrics.counters(
            "weightsync_refused_calls_total",
            "Calls without authority.",
            "reason",
            [reason.lower() for reason in (Reason.UNAUTHENTICATED, Reason.PERMISSION_DENIED)],
        )
        #: Calls of strangers that no line has counted yet, and when the next line may come.
        self._strangers = 0
        self._next_line_s = float("-inf")

    def refuse(self, error: WeightSyncError, attempt: RejectedCall, times: int = 1) -> None:
        """Count calls that were refused at the door, so many alike, and write a line.

        Those that prove nobody's authority get one line a minute, with their number: strangers
        could fill the disk.
        """
        counter = self._refused.get(error.reason.lower())
        if counter is not None:
            counter.inc(times)
        if error.reason is Reason.UNAUTHENTICATED:
            self._strangers += times
            if clock.monotonic() < self._next_line_s:
                return
            self._next_line_s = clock.monotonic() + _STRANGERS_S
            times, self._strangers = self._strangers, 0
        elif error.reason is not Reason.PERMISSION_DENIED:
            return
        line: dict[str, Any] = {
            "time": _now(),
            "who": attempt.who,
            "method": attempt.method,
            "model": self._model,
            "outcome": error.reason.value,
            "peer": attempt.peer,
            "refused": error.message,
        }
        if times > 1:
            line["times"] = times
        log_call("audit.refused", line, {"reason": error.reason.value}, logging.WARNING)

    def write(self, caller: Caller, outcome: str) -> None:
        """Write the line of one call that has ended; `outcome` is the name of its status."""
        roles = caller.rule.roles & caller.principal.roles or {Role.ADMIN}
        line = {
            "time": _now(),
            "who": caller.principal.name,
            "role": "+".join(sorted(roles)),
            "method": caller.method.rpartition("/")[2],
            "model": self._model,
            "version": _version(caller.response) or _version(caller.request),
            "push_id": _push_id(caller.response) or _push_id(caller.request),
            "outcome": outcome,
            "peer": caller.peer,
        }
        log_call("audit.call", line, {**_applied(caller.response), **caller.refusal})
        self._lines.inc()

    def witnessed(self, calls: Mapping[str, UseCase]) -> dict[str, UseCase]:
        """Return what serves methods, by path; what changes state refuses to without a caller.

        This asks again at the work itself: a way around admission changes nothing, and is counted
        as a violation of invariant 11.
        """
        return {
            path: self._witnessed(path, call) if RULES[path].changes else call
            for path, call in calls.items()
        }

    def _witnessed(self, path: str, call: UseCase) -> UseCase:
        async def answer(caller: Caller, request: Any) -> Any:
            self._ask(path, caller)
            with _refusal_noted(caller):
                caller.response = await call(caller, request)
            return caller.response

        async def stream(caller: Caller, request: Any) -> AsyncIterator[Any]:
            self._ask(path, caller)
            with _refusal_noted(caller):
                async with contextlib.aclosing(call(caller, request)) as responses:
                    async for caller.response in responses:
                        yield caller.response

        return stream if inspect.isasyncgenfunction(call) else answer

    def _ask(self, path: str, caller: Caller | None) -> None:
        if (
            caller is None
            or caller.method != path
            or not RULES[path].allows(caller.principal.roles)
        ):
            self._metrics.violate("authority")
            raise WeightSyncError(
                Reason.PERMISSION_DENIED,
                "this call has no rule for who may make it; report this fault",
            )
        caller.worked = True
        self._calls.inc()


def log_call(
    name: str, line: Mapping[str, Any], more: Mapping[str, str], level: int = logging.INFO
) -> None:
    """Log an audit line, of event `name`: text shows it as JSON, JSON its fields and `more`."""
    said = f"{line['who'] or 'unknown caller'} called {line['method']}: {line['outcome']}"
    fields = {key: value for key, value in line.items() if value} | dict(more)
    # ASCII with escapes: no name can end a line or forge one.
    logger.log(level, "%s", json.dumps(line), extra=event(name, message=said, **fields))


@contextlib.contextmanager
def _refusal_noted(caller: Caller) -> Iterator[None]:
    try:
        yield
    except WeightSyncError as error:
        apply_id = error.metadata.get("apply_id", "")
        caller.refusal = {"reason": error.reason.value, "apply_id": apply_id}
        raise


@contextlib.contextmanager
def noting(
    audit: Auditor, caller: Caller, aborted: Callable[[], Any] = lambda: None
) -> Iterator[None]:
    """Have the end of a call written down, if its work has begun.

    `aborted` gives the status of gRPC's aborted context.
    """
    outcome = "UNAVAILABLE"
    try:
        yield
        outcome = "OK"
    except (asyncio.CancelledError, GeneratorExit):
        outcome = "CANCELLED"
        raise
    except WeightSyncError as error:
        outcome = error.code.name
        raise
    except grpc.aio.AbortError:
        outcome = _name(aborted())
        raise
    finally:
        if caller.worked:
            audit.write(caller, outcome)


def _name(code: Any) -> str:
    # gRPC gives the status back as it was set: a member of its enum, or that member's number.
    if isinstance(code, grpc.StatusCode):
        return code.name
    names = {status.value[0]: status.name for status in grpc.StatusCode}
    return names.get(code, "UNKNOWN")


def _now() -> str:
    return dt.datetime.fromtimestamp(clock.wall(), dt.UTC).isoformat(timespec="milliseconds")


def _version(message: Any) -> int:
    """Return the version that a message is about; 0: it names none."""
    return _version_field(message) or _version_field(_kind(message))


def _kind(message: Any) -> Any:
    """Return what is set of a message that is one of several kinds."""
    for kinds in getattr(getattr(message, "DESCRIPTOR", None), "oneofs", ()):
        kind = getattr(message, message.WhichOneof(kinds.name) or "", None)
        if isinstance(kind, Message):
            return kind
    return None


def _version_field(message: Any) -> int:
    found = getattr(message, "report", message)
    while not isinstance(found, int):
        found = getattr(found, "version", 0)
    return found


def _applied(response: Any) -> dict[str, str]:
    """Return the apply and the engines of an answer, if it has any."""
    report = getattr(_kind(response) or response, "report", None)
    engines = [one.engine for one in getattr(response, "engines", ()) if one.report.apply_id]
    return {"apply_id": getattr(report, "apply_id", ""), "engine": ", ".join(engines)}


def _push_id(message: Any) -> str:
    # Of a request it is text from outside: cut, and escaped by json.
    return str(getattr(message, "push_id", ""))[:64]
