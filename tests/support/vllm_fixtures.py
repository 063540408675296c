"""Real vLLM engines on this machine's CPU and checkpoints for them."""

from __future__ import annotations

import json
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.models import make_checkpoint
from tests.support.processors import HAS_AMX, LACKS_AMX
from tests.support.staging import BridgeClient, Staging
from tests.support.vllm_server import VllmServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that makes a checkpoint once per session and set of arguments."""
    root = tmp_path_factory.mktemp("checkpoints")
    made: dict[str, Path] = {}

    def make(arch: str = "qwen2", **options: Any) -> Path:
        key = "-".join([arch, *(f"{k}{v}" for k, v in sorted(options.items()))])
        if key not in made:
            made[key] = make_checkpoint(root / key, arch, **options)
        return made[key]

    return make


@pytest.fixture(scope="module")
def run_dir() -> Iterator[Path]:
    """Return a directory whose path is short enough for unix sockets."""
    directory = Path(tempfile.mkdtemp(prefix="vt"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(True, id="amx", marks=pytest.mark.skipif(not HAS_AMX, reason=LACKS_AMX)),
        # Where there are both, CI looks at what most processors of today do.
        pytest.param(False, id="no-amx", marks=[pytest.mark.battery] if HAS_AMX else []),
    ],
)
def amx(request: pytest.FixtureRequest) -> bool:
    """Return whether vLLM takes the processor for one with AMX."""
    found: bool = request.param
    return found


@dataclass
class Bench:
    """A running vLLM with the server's role played beside it."""

    vllm: VllmServer
    staging: Staging
    client: BridgeClient
    fault_path: Path

    def fault(self, **order: Any) -> None:
        """Let the next commit or verification in a worker go wrong."""
        self.fault_path.write_text(json.dumps(order))


@contextmanager
def running_bench(model: Path, run_dir: Path, **options: Any) -> Iterator[Bench]:
    """Start vLLM with the bridge; everything is stopped at the end."""
    run_dir.mkdir(parents=True, exist_ok=True)
    fault = run_dir / "fault.json"
    extension = "tests.support.fault_extension.FaultExtension"
    vllm = VllmServer(
        model,
        run_dir,
        flags=["--worker-extension-cls", extension, *options.pop("flags", ())],
        variables={"WEIGHTSYNC_TEST_FAULT": str(fault), **options.pop("variables", {})},
        **options,
    )
    staging = Staging(vllm.segment_socket)
    try:
        vllm.start()
        client = BridgeClient(vllm.engine_socket, staging)
        client.hello()
        yield Bench(vllm, staging, client, fault)
        client.close()
    finally:
        vllm.stop()
        staging.close()
