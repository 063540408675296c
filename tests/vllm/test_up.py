"""`weightsync up`: a user without root types it, pushes, and ends it; on a real vLLM."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.servers import free_port
from tests.support.models import make_checkpoint
from tests.support.vllm_server import cpu_environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

_READY_S = 240.0


class _Terminal:
    """One terminal of that user: `up` in the foreground, and other commands beside it."""

    def __init__(self, home: Path, model: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.port, self.model = free_port(), model
        self.output = home / "up.log"
        cpu = cpu_environment()
        # What `up` sets by itself.
        del cpu["WEIGHTSYNC_CPU_PLAIN_WEIGHTS"]
        kept = {k: v for k, v in os.environ.items() if not k.startswith("WEIGHTSYNC_")}
        self.environment = kept | cpu | {
            "XDG_STATE_HOME": str(home / "state"),
            "WEIGHTSYNC_RUN_DIR": str(home / "run"),
            "WEIGHTSYNC_METRICS": "",
            "WEIGHTSYNC_ADDRESS": self.address,
        }  # fmt: skip
        # Root's would be /var/lib/weightsync.
        self.environment["WEIGHTSYNC_STATE_DIR"] = str(home / "state")

    def up(self, *flags: str) -> subprocess.Popen[bytes]:
        own = ["--port", str(self.port), "--enforce-eager", "--max-model-len", "256", *flags]
        with self.output.open("wb") as output:
            return subprocess.Popen(
                [*_PROGRAM, "up", str(self.model), "--", *own],
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def ready(self, process: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + _READY_S
        while "Ctrl-C ends both" not in self.said():
            assert process.poll() is None, self.said()
            assert time.monotonic() < end, self.said()
            # It loads a model, which takes half a minute.
            time.sleep(0.2)

    def run(self, *words: str) -> str:
        done = subprocess.run(
            [*_PROGRAM, *words],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def tokens(self) -> Any:
        asked = {"model": str(self.model), "prompt": "The", "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(asked).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["choices"][0]["text"]


_PROGRAM = [sys.executable, "-m", "weightsync_client.cli"]


def _processes(words: str) -> list[str]:
    found = subprocess.run(["pgrep", "-f", words], capture_output=True, text=True, check=False)
    return found.stdout.split()


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[_Terminal]:
    model = make_checkpoint(tmp_path / "model", seed=1)
    yield _Terminal(tmp_path, model)
    assert _processes(str(model)) == []


def test_one_command_serves_what_is_pushed_and_one_interrupt_ends_it(
    terminal: _Terminal, tmp_path: Path
) -> None:
    other = make_checkpoint(tmp_path / "other", seed=2)
    process = terminal.up()
    terminal.ready(process)
    try:
        assert f"http://127.0.0.1:{terminal.port}/v1" in terminal.said()
        before = terminal.tokens()
        # As it says.
        for command in re.findall(r"`weightsync ([^`]+)`", terminal.said()):
            terminal.run(*command.replace("FOLDER", str(other)).split())
        assert terminal.tokens() != before
        assert "version 2" in terminal.run("status")
    finally:
        os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == 0, terminal.said()
    assert not (tmp_path / "run/engine.sock").exists()


def test_when_vllm_cannot_start_its_error_is_shown_and_both_end(terminal: _Terminal) -> None:
    process = terminal.up("--tensor-parallel-size", "0")
    assert process.wait(120) == 5
    assert re.search(
        r"weightsync: see \S+vllm.log: vLLM ended with code \d+\n.*Error", terminal.said()
    )


@pytest.mark.battery
def test_both_end_when_it_is_killed(terminal: _Terminal) -> None:
    process = terminal.up()
    end = time.monotonic() + 60
    # Two have the words of its command line: the other ends vLLM when it is killed.
    while len(_processes(str(terminal.model))) < 3:
        assert time.monotonic() < end
        time.sleep(0.1)
    process.kill()
    process.wait()
    while _processes(str(terminal.model)) or _processes(terminal.address):
        assert time.monotonic() < end + 60
        # Each has its own time to stop.
        time.sleep(0.1)
