"""Real vLLMs for examples, started by the example that adds us to a vLLM API server."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.demo.model import make_model
from examples.demo.processes import free_port
from tests.support.leftovers import Mark
from tests.support.processes import end, give_way
from tests.support.vllm_server import cpu_environment
from weightsync_client import Client, ClientError, EngineState

_ROOT = Path(__file__).parents[3]
_START_S = 240.0
_STOP_S = 60.0


@dataclass
class Stack:
    """vLLM and weightsync-server as examples/add_to_vllm.sh runs them.

    Attributes:
        model: The checkpoint that vLLM serves.
        server: Address of weightsync-server.
        url: Of vLLM's HTTP API.
    """

    model: Path
    server: str
    url: str

    def python(
        self, example: str, *arguments: str, variables: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start an example."""
        return subprocess.Popen(
            [sys.executable, f"examples/{example}", *arguments, "--server", self.server],
            cwd=_ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def _serving(address: str) -> bool:
    try:
        with Client(address) as client:
            return client.status().models[0].engine.state == EngineState.SERVING
    except ClientError:
        return False


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Serve the demo's model."""
    with running_stack(make_model) as running:
        yield running


@contextlib.contextmanager
def running_stack(make: Callable[[Path], Path], requests: int = 4) -> Iterator[Stack]:
    """Run examples/add_to_vllm.sh; at its end nothing is left of what it started.

    Args:
        make: Makes the checkpoint.
        requests: How many vLLM answers at a time.
    """
    folder = Path(tempfile.mkdtemp(prefix="ws"))
    mark = Mark()
    port = free_port()
    running = Stack(make(folder / "model"), f"unix:{folder}/push.sock", f"http://127.0.0.1:{port}")
    variables = {
        **cpu_environment(),
        **mark.variables,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "WEIGHTSYNC_RUN_DIR": str(folder),
        "WEIGHTSYNC_STATE_DIR": str(folder / "state"),
        "WEIGHTSYNC_LISTEN": json.dumps([running.server]),
        "WEIGHTSYNC_METRICS": "",
    }
    model = str(running.model)
    flags = ["--model", model, "--served-model-name", "model", model, "--dtype", "float32"]
    flags += ["--port", str(port), "--host", "127.0.0.1", "--enforce-eager"]
    flags += ["--max-num-seqs", str(requests)]
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["examples/add_to_vllm.sh", *flags],
            cwd=_ROOT,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    give_way(process.pid)
    try:
        deadline = time.monotonic() + _START_S
        while not _serving(running.server):
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"vLLM did not come up:\n{log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.3)
        yield running
        process.send_signal(signal.SIGTERM)
        process.wait(_STOP_S)
        assert mark.left_after(5) == []
    finally:
        end(process)
        shutil.rmtree(folder, ignore_errors=True)
