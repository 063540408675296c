"""A CUDA vLLM whose memory trainers attach to, a server beside it, and two checkpoints."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from benchmarks.gpu.engine import NO_MULTICAST
from tests.support.kind_site import PROMPTS, SMALL, keep_logs
from tests.support.models import make_checkpoint
from tests.support.vllm_server import VllmServer
from tests.support.weightsync_server import WeightSyncServer
from weightsync_client import Client

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from weightsync_client import types
    from weightsync_client.attach import Attached
    from weightsync_client.attach.transaction import InPlaceTransaction

__all__ = ["AttachedSite", "AttachedTrainer", "content_of", "started", "unlike"]

_SIZES: dict[str, Any] = {
    "dtype": "bfloat16", "hidden": 1024, "layers": 8, "shard_size": "100MB",
}  # fmt: skip


class AttachedSite:
    """A vLLM of the first of two checkpoints, and a server beside it.

    Args:
        root: For all of it; a short path, because unix sockets allow 107 bytes.
        flags: More of vLLM's.
        tp: Tensor parallel size.
        variables: More of vLLM's environment.
        server_flags: More of the server's.
        durable: Whether the server keeps versions over its restarts.
    """

    def __init__(
        self,
        root: Path,
        *flags: str,
        tp: int = 1,
        variables: Mapping[str, str] = MappingProxyType({}),
        server_flags: Sequence[str] = (),
        durable: bool = False,
    ) -> None:
        self.first, self.second = (
            make_checkpoint(root / name, seed=seed, **_SIZES) for seed, name in enumerate("ab")
        )
        self.vllm = VllmServer(
            self.first,
            root / "run",
            tp=tp,
            dtype="bfloat16",
            flags=(*SMALL, *flags),
            variables={**NO_MULTICAST, **variables},
        )
        store = () if durable else ("--store", "memory://")
        own = (*store, "--slots", "3", "--same-host", *server_flags)
        self.server = WeightSyncServer(root / "run", root / "state", flags=own)

    def start(self) -> None:
        """Start both; returns when the engine serves."""
        self.server.start()
        self.vllm.start()
        self.server.wait_serving()

    def stop(self) -> None:
        """Stop both."""
        self.server.stop()
        self.vllm.stop()

    def client(self) -> Client:
        """Return a client of the server."""
        return Client(self.server.address)

    @contextlib.contextmanager
    def attached(self) -> Iterator[Attached]:
        """Attach for the block."""
        with self.client() as client, client.attach() as attached:
            yield attached

    def answers(self) -> list[Any]:
        """What vLLM answers now: tokens and log probabilities."""
        return [self.vllm.complete(prompt) for prompt in PROMPTS]

    def check_served(
        self, attached: Attached, own: Mapping[str, torch.Tensor], update: InPlaceTransaction
    ) -> types.ApplyReport:
        """Check an update of tensors that are the second checkpoint's, and go back from it."""
        after = self.answers()
        report = update.result()
        assert report is not None
        with self.client() as client:
            assert client.verify().verified
            assert unlike(attached, self.second) == []
            for pulled in client.tensors(report.version):
                assert torch.equal(pulled.torch(), own[pulled.name].cpu()), pulled.name
            client.rollback()
            before = self.answers()
            assert before != after
            # Loaded by its ranks from the host's copy, it answers the same.
            client.apply(report.version, clear_rejected=True)
            assert self.answers() == after
            client.rollback()
            assert self.answers() == before
        return report

    def violations(self) -> dict[str, int]:
        """Return what was counted, without what was none."""
        with self.client() as client:
            return {name: n for name, n in client.status().invariant_violations.items() if n}


@dataclass
class AttachedTrainer:
    """A process of `tests.support.attached_trainer`."""

    process: subprocess.Popen[str]

    @classmethod
    @contextlib.contextmanager
    def running(cls, site: AttachedSite) -> Iterator[AttachedTrainer]:
        """Run one until the block ends; it is attached."""
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.attached_trainer", site.server.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            trainer = cls(process)
            assert trainer.line() == "attached"
            yield trainer
        finally:
            process.kill()
            process.communicate()

    def line(self) -> str:
        """Return the next line that it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, what: str) -> str:
        """Return its answer to one line."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return self.line()


@contextlib.contextmanager
def started(
    *flags: str,
    tp: int = 1,
    variables: Mapping[str, str] = MappingProxyType({}),
    server_flags: Sequence[str] = (),
    durable: bool = False,
) -> Iterator[AttachedSite]:
    """Run one for the block; see `AttachedSite`."""
    root = Path(tempfile.mkdtemp(prefix="wg-"))
    site = AttachedSite(
        root, *flags, tp=tp, variables=variables, server_flags=server_flags, durable=durable
    )
    try:
        site.start()
        yield site
    finally:
        site.stop()
        keep_logs(f"attach-{root.name}", site.vllm.run_dir)
        shutil.rmtree(root)


def content_of(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint by name."""
    found: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        found |= load_file(file)
    return found


def unlike(attached: Attached, path: Path) -> list[str]:
    """Return the tensors that are not those of a checkpoint."""
    wanted = content_of(path)
    return [n for n, tensor in wanted.items() if not torch.equal(attached.read(n).cpu(), tensor)]
