"""The parts of the demo as processes: vLLM that knows its server, the server with a trainer."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from examples.demo.processes import free_port, give_way, vllm_command
from weightsync_server.auth.principals import new_token, token_hash

if TYPE_CHECKING:
    from pathlib import Path

    from examples.demo.processes import Processes

__all__ = ["Services", "start_stock_vllm"]

_VLLM = {
    # One core for a model this small; the trainer needs the other.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Services:
    """Where everything is.

    Attributes:
        folder: For sockets, logs, state and checkpoints.
        port: Of vLLM.
        http: Of the server's HTTP API.
        token: Of whoever may train.
    """

    folder: Path
    port: int = field(default_factory=free_port)
    http: int = field(default_factory=free_port)
    token: str = field(default_factory=new_token)

    @property
    def address(self) -> str:
        """Where the server answers gRPC."""
        return f"unix:{self.folder}/server.sock"

    def start_engine(self, processes: Processes, model: Path) -> None:
        """Start vLLM, whose memory a trainer can attach to and which knows the server's address."""
        variables = {
            **_VLLM,
            "VLLM_PLUGINS": "weightsync",
            "WEIGHTSYNC_ENGINE_SOCKET": f"unix:{self.folder}/engine.sock",
            "WEIGHTSYNC_HTTP": f"http://127.0.0.1:{self.http}",
            # A CPU engine needs both words; a GPU engine needs neither.
            "WEIGHTSYNC_CPU_PLAIN_WEIGHTS": "1",
            "WEIGHTSYNC_ATTACH": "1",
        }
        give_way(processes.start("vllm", vllm_command(model, self.port), variables))

    def start_server(self, processes: Processes) -> None:
        """Start weightsync-server and, with it, the trainer."""
        authority = self.folder / "authority.toml"
        authority.touch(mode=0o600)
        authority.write_text(
            '[[principal]]\nname = "teacher"\nroles = ["train"]\nmodels = ["*"]\n'
            f"tokens = {json.dumps([token_hash(self.token)])}\n"
        )
        command = [
            *(sys.executable, "-m", "weightsync_server.cli", "--name", "demo"),
            *("--engine", f"unix:{self.folder}/engine.sock", "--listen", self.address),
            *("--http", f"127.0.0.1:{self.http}", "--authority", str(authority)),
            *("--trainer", "examples.serve_and_train:Tuner"),
            *("--checkpoint-dir", str(self.folder / "checkpoints")),
            *("--run-dir", str(self.folder), "--state-dir", str(self.folder / "state")),
            *("--store", "memory://", "--slots", "3", "--metrics", "", "--drain-timeout-s", "2"),
        ]
        processes.start("weightsync-server", command, {"OMP_NUM_THREADS": "1"})


def start_stock_vllm(processes: Processes, model: Path, port: int) -> None:
    """Start a vLLM that knows nothing of WeightSync."""
    variables = {**_VLLM, "VLLM_PLUGINS": ""}
    processes.start("fresh-vllm", vllm_command(model, port), variables)
