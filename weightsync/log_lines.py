"""The log of a process: lines of text or of JSON, each event on one line, with what it is about.

What a line is about follows the work: `note` and `about` say it where a push or an apply begins,
and tasks that are started from there on keep it. Only JSON lines show it.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import logging
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

TEXT, JSON = "text", "json"

_TEXT_LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
#: Of https://www.w3.org/TR/trace-context: version, trace, span, flags; later ones may have more.
_TRACEPARENT = re.compile(
    r"(?!ff|00.{54})[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-((?!0{16})[0-9a-f]{16}-[0-9a-f]{2})(?:-.*)?"
)

logger = logging.getLogger(__name__)
_facts: ContextVar[Mapping[str, Any]] = ContextVar(
    "weightsync_log_facts", default=MappingProxyType({})
)


def note(**facts: Any) -> None:
    """Have this task, and the tasks that it starts from now on, name these facts in each line.

    None and an empty text take a fact away.
    """
    _facts.set(_given({**_facts.get(), **facts}))


@contextlib.contextmanager
def about(**facts: Any) -> Iterator[None]:
    """Do as `note` until the block ends; tasks that it has started keep the facts."""
    before = _facts.set(_given({**_facts.get(), **facts}))
    try:
        yield
    finally:
        _facts.reset(before)


def event(name: str, **facts: Any) -> dict[str, Any]:
    """Return the `extra` of a line: the name of its event, and facts that only this line has.

    docs/reference/logs.md lists all names, which stay as they are.
    """
    return {"event": name, "facts": facts}


def trace_id(traceparent: str) -> str:
    """Return the id of the trace that a `traceparent` header names; "": it names none."""
    found = _TRACEPARENT.fullmatch(traceparent)
    return found[1] if found else ""


def traceparent(header: str) -> str:
    """Return what a `traceparent` header of any version says, as version 00; "": it names none."""
    found = _TRACEPARENT.fullmatch(header)
    return f"00-{found[1]}-{found[2]}" if found else ""


def configure(form: str, level: int | str, model: str = "") -> None:
    """Have this process log to stderr, as TEXT or JSON; `model` is in every line of JSON."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(model) if form == JSON else logging.Formatter(_TEXT_LINE))
    logging.basicConfig(level=level, handlers=[handler])
    if form == JSON:
        # What Python would print by itself, over several lines.
        logging.captureWarnings(True)
        sys.excepthook = _uncaught
        sys.unraisablehook = threading.excepthook = _uncaught_elsewhere


def configuration() -> dict[str, Any]:
    """Return arguments of `configure` with which a child logs as this process does."""
    level = logging.root.level
    for handler in logging.root.handlers:
        if isinstance(handler.formatter, JsonLines):
            return {"form": JSON, "level": level, "model": handler.formatter.model}
    return {"form": TEXT, "level": level}


class JsonLines(logging.Formatter):
    """Makes one line of each record and its traceback; in ASCII, so that no text ends a line."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.model = model

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = {
            "time": dt.datetime.fromtimestamp(record.created, dt.UTC).isoformat(
                timespec="milliseconds"
            ),
            "level": record.levelname,
            "logger": record.name,
            "event": getattr(record, "event", "log"),
            "message": record.getMessage(),
            "model": self.model,
            **_facts.get(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(_given(line), default=str)


def _given(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value not in (None, "")}


def _uncaught(kind: Any, error: Any, trace: Any) -> None:
    if not issubclass(kind, SystemExit):
        found = (kind, error, trace)
        logger.critical("uncaught %s", kind.__name__, exc_info=found, extra=event("uncaught"))


def _uncaught_elsewhere(found: Any) -> None:
    """Do the same for an error in a thread, or where Python can raise none."""
    _uncaught(found.exc_type, found.exc_value, found.exc_traceback)
