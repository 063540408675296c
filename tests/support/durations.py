"""A pytest plugin that writes what a run did and where its time went: `-p tests.support.durations`.

`--durations-json FILE` writes one JSON object: the seconds of the run, and one entry per test, by
node id, with its outcome (and the reason of a skip, or the text of a failure), the seconds by the
clock and of the processor for its set-up, call and tear-down, how many processes it started, by
kind, and what it tells of itself as `user_properties`. A fixture's time is that of the first test
that asked for it. Processor time counts the process that runs the tests and the children that ended
meanwhile.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption(
        "--durations-json", type=Path, metavar="FILE", help="write the time of every test to FILE"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Measure in a process that runs tests; collect in the one that the user started."""
    file = config.getoption("--durations-json")
    if file is None:
        return
    config.pluginmanager.register(_Measured())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Collected(file))


class _Measured:
    """Adds to the report of every phase what it took since the phase before."""

    def __init__(self) -> None:
        self._started: Counter[str] = Counter()
        self._processor_s = _processor_s()
        sys.addaudithook(self._count)

    def _count(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":
            self._started[_kind(arguments[1])] += 1
        elif event in {"os.fork", "os.posix_spawn"}:
            self._started["other"] += 1

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add it as attributes, which pytest-xdist carries along."""
        report = yield
        now = _processor_s()
        report.__dict__["processor_s"] = now - self._processor_s
        report.__dict__["started"] = dict(self._started)
        self._processor_s = now
        self._started.clear()
        return report


class _Collected:
    """Writes the file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._tests: dict[str, dict[str, Any]] = {}
        self._begin = time.monotonic()

    def _test(self, node_id: str) -> dict[str, Any]:
        empty = {"outcome": "passed", "clock_s": {}, "processor_s": {}, "started": Counter()}
        return self._tests.setdefault(node_id, empty)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a module that is skipped, or cannot be read."""
        if not report.passed:
            self._test(report.nodeid).update(_outcome(report))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a phase."""
        test = self._test(report.nodeid)
        if not report.passed and test["outcome"] != "failed":
            test.update(_outcome(report))
        test["clock_s"][report.when] = round(report.duration, 4)
        test["processor_s"][report.when] = round(getattr(report, "processor_s", 0.0), 4)
        test["started"].update(getattr(report, "started", {}))
        if report.user_properties:
            test["properties"] = dict(report.user_properties)

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        run = {
            "run_s": round(time.monotonic() - self._begin, 1),
            "tests": dict(sorted(self._tests.items())),
        }
        self._file.write_text(json.dumps(run, indent=1) + "\n")


def _outcome(report: pytest.TestReport | pytest.CollectReport) -> dict[str, str]:
    if report.skipped:
        # Of a test that is expected to fail and did, there is text instead.
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        return {"outcome": "skipped", "reason": reason.removeprefix("Skipped: ")}
    return {"outcome": "failed", "text": report.longreprtext}


def _kind(argv: object) -> str:
    words = " ".join(map(os.fsdecode, argv)) if isinstance(argv, list | tuple) else str(argv)
    return next((kind for kind in ("vllm", "weightsync_server", "etcd") if kind in words), "other")


def _processor_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
