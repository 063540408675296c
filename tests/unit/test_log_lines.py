"""Lines of the log: one for each event, with what the work is about, and names that stay."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weightsync import log_lines
from weightsync.log_lines import JsonLines, about, event, note, trace_id

ROOT = Path(__file__).resolve().parents[2]
_CODE = ("weightsync", "server/weightsync_server", "client/weightsync_client")
#: A trace, as a `traceparent` header names it.
_TRACE = "0af7651916cd43dd8448eb211c80319c"


def _line(message: str = "said", *args: object, **more: Any) -> dict[str, Any]:
    record = logging.getLogger("weightsync_server.x").makeRecord(
        "weightsync_server.x", logging.INFO, "x.py", 1, message, args, more.pop("exc_info", None)
    )
    for name, value in more.items():
        setattr(record, name, value)
    text = JsonLines("policy").format(record)
    assert text.isascii()
    assert text.isprintable()
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_line_says_what_where_and_of_which_model() -> None:
    line = _line("%d bytes", 3)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line.pop("time"))
    assert line == {
        "level": "INFO",
        "logger": "weightsync_server.x",
        "event": "log",
        "message": "3 bytes",
        "model": "policy",
    }


def test_no_text_ends_a_line_or_forges_one() -> None:
    hostile = 'x"}\n{"event": "apply.done"}\r\u2028\u0085\x00\u202e'
    assert _line("%s", hostile)["message"] == hostile
    with about(engine=hostile):
        assert _line()["engine"] == hostile


def test_an_exception_is_in_its_line() -> None:
    try:
        raise ValueError("one\ntwo")
    except ValueError:
        line = _line(exc_info=sys.exc_info())
    assert line["exception"].startswith("Traceback (most recent call last):\n")
    assert line["exception"].endswith("ValueError: one\ntwo")


def test_a_line_has_an_event_and_facts_of_its_own_before_those_around_it() -> None:
    with about(version=3, apply_id="a"):
        line = _line(**event("apply.done", version=4, paused_ms=0.0, engine=""))
    assert (line["event"], line["version"], line["apply_id"]) == ("apply.done", 4, "a")
    assert line["paused_ms"] == 0.0
    assert "engine" not in line, "what is empty is left out"
    assert "version" not in _line()


async def test_a_task_keeps_what_it_was_started_in() -> None:
    async def noted(go: asyncio.Event) -> list[Any]:
        before = _line()["version"]
        note(version=9)
        await go.wait()
        return [before, _line()["version"], _line()["apply_id"]]

    go = asyncio.Event()
    with about(version=1, apply_id="a"):
        with about(version=2, apply_id=None):
            assert "apply_id" not in _line()
        task = asyncio.create_task(noted(go))
    other = asyncio.create_task(asyncio.to_thread(_line))
    go.set()
    assert await task == [1, 9, "a"]
    assert "version" not in await other


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (f"00-{_TRACE}-b7ad6b7169203331-01", _TRACE),
        (f"cc-{_TRACE}-b7ad6b7169203331-01-more", _TRACE),
        (f"cc-{_TRACE}-b7ad6b7169203331-01more", ""),
        (f"00-{_TRACE}-b7ad6b7169203331-01-more", ""),
        (f"00-{_TRACE}-b7ad6b7169203331-01x", ""),
        ("", ""),
        (f"ff-{_TRACE}-b7ad6b7169203331-01", ""),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", ""),
        (f"00-{_TRACE.upper()}-b7ad6b7169203331-01", ""),
        (f"00-{_TRACE}\n-b7ad6b7169203331-01", ""),
    ],
)
def test_a_trace_is_taken_of_a_header_that_names_one(header: str, found: str) -> None:
    assert trace_id(header) == found


_PROGRAM = """
import logging, sys, threading, warnings
from weightsync import log_lines
log_lines.configure(sys.argv[1], "INFO", "policy")
logging.getLogger("x").info("hello")
logging.getLogger("x").debug("unseen")
warnings.warn("old\\nway")
def fail():
    raise ValueError("in a\\nthread")
thread = threading.Thread(target=fail)
thread.start()
thread.join()
class Bad:
    def __del__(self):
        raise ValueError("at its end")
Bad()
raise KeyError("main")
"""


def _run(form: str) -> str:
    command = [sys.executable, "-c", _PROGRAM, form]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert not done.stdout
    return done.stderr


def test_all_that_a_process_says_is_json() -> None:
    lines = [json.loads(line) for line in _run(log_lines.JSON).splitlines()]
    assert [line["event"] for line in lines] == ["log", "log", *["uncaught"] * 3]
    assert all(line["model"] == "policy" for line in lines)
    errors = [line["exception"].splitlines()[-1] for line in lines[2:]]
    assert errors == ["thread", "ValueError: at its end", "KeyError: 'main'"]


def test_text_is_as_it_was() -> None:
    first, *others = _run(log_lines.TEXT).splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO x: hello", first)
    assert others[-1] == "KeyError: 'main'"


def test_the_page_lists_every_event_of_the_code() -> None:
    texts = [path.read_text() for folder in _CODE for path in (ROOT / folder).rglob("*.py")]
    names = r"(?:event|log_call)\(\s*\"([^\"]+)\"(?: if \w+ else \"([^\"]+)\")?"
    found = {name for text in texts for pair in re.findall(names, text) for name in pair if name}
    # Each use is of a name that can be found, but that of what hands one on.
    uses = sum(len(re.findall(r"(?<!def )\bevent\(|(?<!def )\blog_call\(", text)) for text in texts)
    assert uses == sum(len(re.findall(names, text)) for text in texts) + 1
    page = (ROOT / "docs/reference/logs.md").read_text()
    table = page.partition("## Events")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `([\w.]+)` \|", table, re.MULTILINE)
    assert listed == sorted(found | {"log"}), "names stay: list a new one, and keep the others"
