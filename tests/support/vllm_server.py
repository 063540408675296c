"""Starts real vLLM API servers on this machine's CPU and stops them by process group."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.servers import free_port
from tests.support.completion import Completion
from tests.support.processes import give_way

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["VllmServer", "attention_backends", "cpu_environment", "own_core"]

_START_S = 480.0
#: What vLLM says of the kernels that it has chosen for attention, also in releases before 0.32.
_ATTENTION = re.compile(
    r"Using (?:AttentionBackendEnum\.)?([A-Z][A-Z0-9_]+)(?: attention)? backend"
)
#: Those that answer now.
_up: list[VllmServer] = []


def attention_backends() -> tuple[str, ...]:
    """Return the names of what the vLLM that answer now compute attention with, sorted."""
    logs = (server.log_path.read_text(errors="replace") for server in _up)
    return tuple(sorted({name for log in logs for name in _ATTENTION.findall(log)}))


def cpu_environment(*, workers: int = 1, plain: bool = True) -> dict[str, str]:
    """Return the environment variables with which vLLM runs on a small CPU machine.

    Args:
        workers: How many it starts, a core for each.
        plain: Whether CPU repacking is off.
    """
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "WEIGHTSYNC_CPU_PLAIN_WEIGHTS": "1" if plain else "0",
    }
    cores = [str(core) for core in range(workers)] if workers > 1 else [own_core()]
    variables["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(cores)
    return variables


def own_core(number: int = 0) -> str:
    """Return the core for the nth engine of this process, one rank each.

    By itself vLLM binds every engine of one rank to the first core. Each worker of pytest-xdist
    begins at another one here.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return str((worker + number) % (os.cpu_count() or 1))


@dataclass
class VllmServer:
    """A stock vLLM API server in a process group of its own.

    Attributes:
        model: Checkpoint directory.
        run_dir: For sockets and the log; a short path, because unix sockets allow 107 bytes.
        tp: Tensor parallel size.
        pp: Pipeline parallel size; with stages vLLM compiles the model, for on a CPU it has no
            eager ones.
        dp: Data parallel size.
        dtype: vLLM's --dtype.
        plain: Whether CPU repacking is off.
        bridge: Whether our endpoint plugin is loaded; without it vLLM serves at once.
        flags: More vLLM flags.
        variables: More environment variables.
        start_s: Longest time until HTTP answers, in seconds.
    """

    model: Path
    run_dir: Path
    tp: int = 1
    pp: int = 1
    dp: int = 1
    dtype: str = "float32"
    plain: bool = True
    bridge: bool = True
    flags: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    start_s: float = _START_S
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def engine_socket(self) -> Path:
        """Where the bridge serves."""
        return self.run_dir / "engine.sock"

    @property
    def segment_socket(self) -> Path:
        """Where the bridge and the workers look for the server's segments."""
        return self.run_dir / "segments.sock"

    @property
    def log_path(self) -> Path:
        """What vLLM printed."""
        return self.run_dir / "vllm.log"

    @property
    def url(self) -> str:
        """Address of the HTTP API."""
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        """Return the command line."""
        return [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(self.model), "--served-model-name", "model", "--dtype", self.dtype,
            "--port", str(self.port), "--host", "127.0.0.1", "--max-model-len", "512",
            "--tensor-parallel-size", str(self.tp), "--pipeline-parallel-size", str(self.pp),
            "--data-parallel-size", str(self.dp), "--max-num-seqs", "8",
            "--enforce-eager" if self.pp == 1 else "--no-enforce-eager",
            "--disable-uvicorn-access-log", *self.flags,
        ]  # fmt: skip

    def start(self) -> VllmServer:
        """Start it and wait until HTTP answers."""
        return self.launch().ready()

    def launch(self) -> VllmServer:
        """Start it; several start in less time beside each other than one after the other."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            **cpu_environment(workers=self.tp * self.pp * self.dp, plain=self.plain),
            "WEIGHTSYNC_ENGINE_SOCKET": f"unix:{self.engine_socket}",
            # Without the bridge the general plugin alone is loaded: it sets the layout.
            **({"VLLM_PLUGINS": "weightsync"} if self.bridge else {}),
            **self.variables,
        }
        if not self.bridge:
            environment.pop("VLLM_PLUGINS", None)
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self.command(), env=environment, stdout=log, stderr=log, start_new_session=True
            )
        return self

    def ready(self) -> VllmServer:
        """Wait until HTTP answers."""
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def _wait(self) -> None:
        deadline = time.monotonic() + self.start_s
        while time.monotonic() < deadline:
            assert self.process is not None
            if self.process.poll() is not None:
                break
            if self.healthy():
                # Not before: a start on a busy machine takes its time as it is.
                give_way(self.process.pid)
                _up.append(self)
                return
            time.sleep(0.2)
        tail = self.log_path.read_text(errors="replace")[-20000:]
        msg = f"vLLM did not start:\n{tail}"
        raise RuntimeError(msg)

    def healthy(self) -> bool:
        """Whether /health answers 200."""
        with contextlib.suppress(OSError):
            return self.request("/health")[0] == 200
        return False

    def answers(self) -> bool:
        """Whether a completion is answered at all with 200."""
        body = {"model": "model", "prompt": "x", "max_tokens": 1}
        with contextlib.suppress(OSError):
            return self.request("/v1/completions", body, timeout=20)[0] == 200
        return False

    def request(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        timeout: float = 180.0,
        core: int | None = None,
    ) -> tuple[int, Any]:
        """Return status and decoded body of one HTTP call; `core` is the engine core to answer."""
        headers = {} if core is None else {"x-data-parallel-rank": str(core)}
        with self.ask(path, body, headers, timeout) as answer:
            raw, status = answer.read(), answer.status
        try:
            return status, json.loads(raw)
        except ValueError:
            return status, raw.decode(errors="replace")

    def ask(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 180.0,
    ) -> Any:
        """Return the open answer to an HTTP call, whatever its status, as http.client has it."""
        data = None if body is None else json.dumps(body).encode()
        named = {"content-type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.url + path, data=data, headers=named)
        try:
            return urllib.request.urlopen(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            return error

    def complete(self, prompt: str, tokens: int = 16, core: int | None = None) -> Completion:
        """Return the tokens and log probabilities of a greedy completion; see `request`."""
        status, answer = self.request(
            "/v1/completions",
            {
                "model": "model",
                "prompt": prompt,
                "max_tokens": tokens,
                "temperature": 0,
                "logprobs": 3,
                "ignore_eos": True,
                "return_token_ids": True,
            },
            core=core,
        )
        assert status == 200, (status, answer)
        return Completion.read(answer)

    def stop(self) -> None:
        """Stop the server and everything that it started."""
        if self in _up:
            _up.remove(self)
        if self.process is None:
            return
        group = self.process.pid
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        self.process.wait(timeout=20)
        self.process = None
