"""A real server alone, and the whole compose file running in namespaces."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.deploy.compose_file import Service, load
from tests.deploy.containers import Stack
from tests.support.models import make_checkpoint
from tests.support.processes import stop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from weightsync_client import ApplyReport, PushResult

#: Longer than a vLLM takes to start on two busy cores.
_START_S = 270


@pytest.fixture(scope="session")
def promtool(program: Callable[[str, str], str]) -> str:
    return program("promtool", "prometheus")


@pytest.fixture(scope="session")
def docker_compose(program: Callable[[str, str], str]) -> str:
    return program("docker-compose", "docker-compose")


@pytest.fixture(scope="session")
def services(docker_compose: str) -> dict[str, Service]:
    return load(docker_compose, "docker-compose.yml", variables={"MODEL_DIR": "/model"})


@dataclass(frozen=True)
class LoneServer:
    """A weightsync-server whose engine never comes."""

    port: int

    def scrape(self) -> str:
        """Return what /metrics answers."""
        url = f"http://127.0.0.1:{self.port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return bytes(answer.read()).decode()


@pytest.fixture(scope="module")
def lone_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoneServer]:
    folder = tmp_path_factory.mktemp("lone")
    command = [
        f"{sys.prefix}/bin/weightsync-server", "--store=memory://", "--fetchers=1",
        f"--state-dir={folder}/state", f"--run-dir={folder}", f"--engine=unix:{folder}/engine.sock",
        "--listen=127.0.0.1:0", "--metrics=127.0.0.1:0",
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "metrics on http://" in line:
                yield LoneServer(int(line.partition("127.0.0.1:")[2].split("/")[0]))
                break
        else:
            pytest.fail(f"the server ended with {process.wait()}")
    finally:
        # What it still prints is read, or it could not end.
        with ThreadPoolExecutor(1) as reader:
            reader.submit(process.stderr.read)
            stop(process)
        process.stderr.close()


def require_namespaces() -> None:
    """Skip where namespaces cannot be made; fail in CI, which runs as root."""
    probe = ["unshare", "--mount", "--ipc", "--pid", "--net", "--fork", "mount", "-t", "tmpfs"]
    ran = subprocess.run([*probe, "none", "/mnt"], capture_output=True, text=True, check=False)
    if os.geteuid() == 0 and ran.returncode == 0:
        return
    reason = f"needs root and namespaces ({ran.stderr.strip() or 'not root'})"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("compose") / "model", dtype="bfloat16")


@pytest.fixture(scope="module")
def stack(docker_compose: str, promtool: str, checkpoint: Path) -> Iterator[Stack]:
    """Every service of the compose file but Grafana, healthy by its own healthcheck."""
    require_namespaces()
    del promtool  # its package brings the prometheus that is started here
    found = load(docker_compose, "docker-compose.yml", variables={"MODEL_DIR": str(checkpoint)})
    vllm_uid = found["vllm"].uid
    for path in (checkpoint, *checkpoint.iterdir()):
        # The server gets descriptors of these files and needs no right to open them.
        os.chown(path, vllm_uid, vllm_uid)
        path.chmod(0o700 if path.is_dir() else 0o600)
    with Stack(found) as running:
        running.start("weightsync-server").wait_healthy(60)
        vllm = running.start("vllm")
        running.start("prometheus").wait_healthy(60)
        vllm.wait_log("Application startup complete", _START_S)
        vllm.wait_healthy(60)
        yield running


@dataclass(frozen=True)
class Applied:
    """What a trainer and a generator did with the stack."""

    state: dict[str, Any]
    pushed: PushResult
    report: ApplyReport


@pytest.fixture(scope="module")
def applied(stack: Stack, checkpoint: Path) -> Applied:
    """Push a changed version with the real client and make it live; then ask for nonsense."""
    from safetensors.torch import load_file

    from weightsync_client import Client, NotFoundError

    state = {k: v * 1.5 for f in checkpoint.glob("*.safetensors") for k, v in load_file(f).items()}
    with Client(f"unix:{stack.volume('clients')}/weightsync.sock") as client:
        pushed = client.push(state)
        report = client.apply(pushed.version)
        client.report_logprobs(pushed.version, [-1.0, -2.0], [-1.01, -2.0])
        with pytest.raises(NotFoundError):
            client.apply(pushed.version + 1)
    return Applied(state, pushed, report)
