"""The demo as a user runs it: `python -m examples.demo`, in real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.demo.model import SENTENCE
from tests.support.bounds import within
from tests.support.leftovers import Mark
from tests.support.processes import stop

# It ends in three minutes, or later on a machine that others keep busy.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(960)]

_ROOT = Path(__file__).parents[3]
_ROW = re.compile(r"^ *(\d+) +([\d.]+) +[\d.]+ MB +([\d.]+)% +[\d.]+ +[\d.]+ +[\d.]+  (.*)$")
# What the last processes need to be gone once the demo itself is.
_GONE_S = 5.0


class Demo:
    """A running demo whose lines can be awaited."""

    def __init__(self, *arguments: str) -> None:
        self.mark = Mark()
        self.lines: list[str] = []
        self._news = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "examples.demo", *arguments],
            cwd=_ROOT,
            env={**os.environ, **self.mark.variables, "COLUMNS": "200"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A session of its own, so that the tests' Ctrl-C is not the demo's.
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()

    @property
    def rows(self) -> list[tuple[str, ...]]:
        return [match.groups() for line in self.lines if (match := _ROW.match(line))]

    def wait_for(self, text: str, seconds: float) -> None:
        with self._news:
            assert self._news.wait_for(lambda: any(text in line for line in self.lines), seconds), (
                self.lines
            )

    def wait(self, seconds: float) -> int:
        status = self.process.wait(seconds)
        self._reader.join()
        return status

    def end(self) -> None:
        try:
            stop(self.process)
        finally:
            self._reader.join()
            assert self.process.stdout is not None
            self.process.stdout.close()


@pytest.fixture
def demo(request: pytest.FixtureRequest) -> Iterator[Demo]:
    running = Demo(*getattr(request, "param", ()))
    try:
        yield running
    finally:
        running.end()


def test_the_model_learns_while_it_generates(demo: Demo) -> None:
    status = demo.wait(900)
    output = "\n".join(demo.lines)
    assert status == 0, output
    assert demo.mark.left_after(_GONE_S) == []
    versions = [int(row[0]) for row in demo.rows]
    losses = [float(row[1]) for row in demo.rows]
    shares = [float(row[2]) for row in demo.rows]
    texts = [row[3] for row in demo.rows]
    assert len(versions) >= 5, output
    assert versions == sorted(set(versions)), output
    assert losses[-1] < losses[0] / 5, output
    # All of the first version is sent, and of the others what changed.
    assert shares[0] == 100, output
    assert max(shares[1:]) < 70, output
    assert texts[0] != SENTENCE.strip(), output
    # What the model was saying when the last version came, or all of it.
    spoken, so_far, _ = texts[-1].partition(" …")
    assert SENTENCE.strip().startswith(spoken), output
    assert so_far or spoken == SENTENCE.strip(), output
    # Asked once more at the end, it said all.
    assert demo.lines[-1].startswith("Learned: the model answers with the sentence"), output


@pytest.mark.battery
@pytest.mark.parametrize("demo", [("--train-seconds", "0")], indirect=True)
def test_a_model_that_has_not_learned_fails_the_demo(demo: Demo) -> None:
    status = demo.wait(360)
    assert status == 1, demo.lines
    assert any("Not learned" in line for line in demo.lines), demo.lines
    assert demo.mark.left_after(_GONE_S) == []


def test_ctrl_c_while_vllm_starts_leaves_nothing_behind(demo: Demo) -> None:
    demo.wait_for("Starting vLLM", 60)
    # The demo, vLLM and the server.
    within(60, lambda: len(demo.mark.alive()) >= 3)
    os.kill(demo.process.pid, signal.SIGINT)
    assert demo.wait(60) == 130, demo.lines
    assert demo.mark.left_after(_GONE_S) == []
