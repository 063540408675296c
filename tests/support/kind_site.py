"""A vLLM of one kind of model on a GPU, a server beside it, and a fresh engine to compare with."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from benchmarks.gpu.checkpoint import write_checkpoint
from benchmarks.gpu.device_memory import DeviceMemory
from benchmarks.gpu.engine import NO_MULTICAST
from benchmarks.gpu.in_place import InPlaceTrainer
from benchmarks.servers import descendants, rss_anon
from tests.support.models import save_tokenizer
from tests.support.stock import push_folder
from tests.support.vllm_server import VllmServer
from tests.support.weightsync_server import WeightSyncServer
from weightsync.failpoints import VARIABLE
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.wire.rpc_status import from_call
from weightsync_client import Client

if TYPE_CHECKING:
    from benchmarks.gpu.kinds import Kind
    from weightsync.errors import WeightSyncError

__all__ = ["LOGS", "PROMPTS", "SMALL", "Fresh", "KindSite", "keep_logs"]

#: Environment variable: a folder for the logs of every site that was stopped.
LOGS = "WEIGHTSYNC_TEST_LOGS"

#: vLLM's flags for engines of several tests, which start beside each other on one device.
SMALL = (
    "--no-enforce-eager",
    "--compilation-config",
    '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}',
    "--gpu-memory-utilization",
    "0.08",
    "--kv-cache-memory-bytes",
    str(256 << 20),
)
_FLAGS = (*SMALL, "--worker-extension-cls", "benchmarks.gpu.extension.GpuProbe")
_ROOM = "4GiB"
PROMPTS = ("hello world", "the quick brown fox", "a")
_READY_S = 150.0
_WARM_S = 180.0


@dataclass(frozen=True)
class Fresh:
    """What an engine that loaded a content by itself answers and holds."""

    answers: list[Any]
    digests: dict[str, str]


class KindSite:
    """Two contents of one kind, `a` and `b`; vLLM serves the first.

    Args:
        kind: Of the model.
        root: For all of it; a short path, because unix sockets allow 107 bytes.
        flags: More of vLLM's.
        tp: Tensor parallel size.
        dp: Data parallel size.
    """

    def __init__(self, kind: Kind, root: Path, *flags: str, tp: int = 1, dp: int = 1) -> None:
        self.kind = kind
        self._flags = flags
        self._tp, self._dp = tp, dp
        self.folders = {name: root / name for name in "ab"}
        _write(kind, *self.folders.values())
        self._plan = root / "plan"
        self.vllm = self._vllm(root / "run", "a", bridge=True)
        self._alone = self._vllm(root / "alone", "b", bridge=False)
        self.server = WeightSyncServer(
            root / "run",
            root / "state",
            flags=("--store", "memory://"),
            variables={VARIABLE: f"@{self._plan}"},
        )

    def _vllm(self, run: Path, content: str, *, bridge: bool) -> VllmServer:
        return VllmServer(
            self.folders[content],
            run,
            dtype="bfloat16",
            bridge=bridge,
            tp=self._tp,
            dp=self._dp,
            flags=[*_FLAGS, *self.kind.flags, *self._flags],
            variables={
                **NO_MULTICAST,
                "VLLM_SERVER_DEV_MODE": "1",
                "WEIGHTSYNC_DEVICE_ROOM": _ROOM,
                VARIABLE: f"@{self._plan}",
                **self.kind.variables,
            },
        )

    def start(self) -> Fresh:
        """Start all; return what a fresh engine of the second content was, which is gone then."""
        self._alone.launch()
        try:
            self.server.start()
            self.vllm.start()
            self._alone.ready()
            _warm(self._alone)
            fresh = Fresh(answers(self._alone), digests(self._alone))
        finally:
            self._alone.stop()
        self.server.wait_serving(_READY_S)
        _warm(self.vllm)
        self.client = Client(self.server.address)
        return fresh

    def stop(self) -> None:
        """Stop everything."""
        if hasattr(self, "client"):
            self.client.close()
        try:
            self.server.stop()
        finally:
            self.vllm.stop()
            keep_logs(self.kind.name, self.vllm.run_dir, self._alone.run_dir)

    def answers(self) -> list[Any]:
        """What vLLM answers now: tokens and log probabilities."""
        return answers(self.vllm)

    def digests(self) -> dict[str, str]:
        """Of all that its model computes from."""
        return digests(self.vllm)

    def push(self, content: str) -> int:
        """Push a content as a new version; return its number."""
        return push_folder(self.server.stub, self.folders[content]).version

    def apply(self, version: int) -> pb.ApplyReport:
        """Apply a version."""
        request = pb.ApplyVersionRequest(model="default", version=version)
        return self.server.stub.ApplyVersion(request, timeout=120).report

    def refused(self, version: int, plan: str = "") -> WeightSyncError:
        """Apply a version that is refused, while things fail as planned; return why."""
        self.arm(plan)
        try:
            self.apply(version)
        except grpc.RpcError as error:
            refusal = from_call(error)
            assert refusal is not None
            return refusal
        finally:
            self.arm("")
        msg = "it was applied"
        raise AssertionError(msg)

    def rollback(self) -> pb.ApplyReport:
        """Go back to the version before."""
        return self.server.stub.Rollback(pb.RollbackRequest(model="default"), timeout=120).report

    def verified(self) -> bool:
        """Whether every rank proves to hold the live version."""
        request = pb.VerifyVersionRequest(model="default")
        return self.server.stub.VerifyVersion(request, timeout=120).verified

    def arm(self, plan: str) -> None:
        """Let server and vLLM fail as planned; empty: let nothing fail."""
        if plan:
            self._plan.write_text(plan)
        else:
            self._plan.unlink(missing_ok=True)

    def memory(self) -> tuple[int, int]:
        """Return the bytes that vLLM's processes hold of the device, and of the host for itself."""
        assert self.vllm.process is not None
        # What is still being freed is not told apart from what stays.
        time.sleep(0.5)
        processes = descendants(self.vllm.process.pid)
        return DeviceMemory().of(processes), rss_anon(processes)


def keep_logs(name: str, *runs: Path) -> None:
    """Copy logs to where a variable says: what is on a lent host is gone with it.

    Args:
        name: Of what made them.
        *runs: Folders that have them.
    """
    if LOGS in os.environ:
        target = Path(os.environ[LOGS]) / name
        target.mkdir(parents=True, exist_ok=True)
        for run in runs:
            for log in run.glob("*.log"):
                shutil.copy(log, target / f"{run.name}-{log.name}")


def _warm(vllm: VllmServer) -> None:
    """Let kernels be compiled that are compiled when they are first run."""
    body = {"model": "model", "prompt": PROMPTS[0], "max_tokens": 4}
    status, answer = vllm.request("/v1/completions", body, timeout=_WARM_S)
    assert status == 200, answer


def answers(vllm: VllmServer) -> list[Any]:
    """Return what a vLLM answers, and each of its engine cores: tokens and log probabilities."""
    cores = [core if vllm.dp > 1 else None for core in range(vllm.dp)]
    return [vllm.complete(prompt, core=core) for core in cores for prompt in PROMPTS]


def digests(vllm: VllmServer) -> dict[str, str]:
    """Return the digests of all that its model computes from, by rank; those of one engine core."""
    status, answer = vllm.request("/collective_rpc", {"method": "bench_digests"}, timeout=120)
    assert status == 200, answer
    ranks = answer["results"]
    assert all(ranks)
    if len(ranks) == 1:
        return dict(ranks[0])
    return {f"{rank}: {name}": d for rank, found in enumerate(ranks) for name, d in found.items()}


def _write(kind: Kind, first: Path, second: Path) -> None:
    write_checkpoint(first, kind.spec(small=True))
    save_tokenizer(first)
    shutil.copytree(first, second)
    trainer = InPlaceTrainer(str(second))
    trainer.change()
    trainer.close()
