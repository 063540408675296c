"""A real vLLM whose two ranks are on two nodes, which are process groups of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.servers import free_port
from tests.support.processes import give_way
from tests.support.vllm_server import VllmServer, cpu_environment

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["NodesVllm"]

#: `vllm serve`, which alone knows --headless; the command itself does not start in CPU builds.
_SERVE = """
from vllm.entrypoints.cli.serve import cmd_init
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.utils.argparse_utils import FlexibleArgumentParser
if __name__ == "__main__":
    cli_env_setup()
    parser = FlexibleArgumentParser()
    (command,) = cmd_init()
    command.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    given = parser.parse_args()
    command.validate(given)
    command.cmd(given)
"""


@dataclass
class NodesVllm(VllmServer):
    """The first node has the API server; the other one runs headless.

    Attributes:
        other_dir: For the other node's sockets and log.
    """

    other_dir: Path = field(kw_only=True)
    master_port: int = field(default_factory=free_port)
    other: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        """Return the command line of the first node."""
        module, *flags = super().command()[2:]
        del module
        return [sys.executable, str(self._script()), "serve", *flags, *self._node(0)]

    def launch(self) -> NodesVllm:
        """Start both."""
        # A core for each.
        self.variables = {
            **self.variables,
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_CPU_OMP_THREADS_BIND": "0",
        }
        super().launch()
        self.other_dir.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            **cpu_environment(plain=self.plain),
            **self.variables,
            "VLLM_CPU_OMP_THREADS_BIND": "1",
            "VLLM_PLUGINS": "weightsync",
            "WEIGHTSYNC_ENGINE_SOCKET": f"unix:{self.other_dir / 'engine.sock'}",
        }
        flags = super().command()[3:]
        command = [
            sys.executable, str(self._script()), "serve", *flags, *self._node(1), "--headless",
        ]  # fmt: skip
        with (self.other_dir / "vllm.log").open("wb") as log:
            self.other = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        give_way(self.other.pid)
        return self

    def stop(self) -> None:
        """Stop both and everything that they started."""
        other, self.other = self.other, None
        if other is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(other.pid, signal.SIGTERM)
        super().stop()
        if other is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                other.wait(timeout=20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(other.pid, signal.SIGKILL)
            other.wait(timeout=20)

    def _script(self) -> Path:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        script = self.run_dir / "serve.py"
        script.write_text(_SERVE)
        return script

    def _node(self, rank: int) -> list[str]:
        return [
            "--nnodes", "2", "--node-rank", str(rank), "--master-addr", "127.0.0.1",
            "--master-port", str(self.master_port), "--distributed-executor-backend", "mp",
        ]  # fmt: skip
