"""The main path on a CUDA vLLM with CUDA graphs: adopt, push, apply, verify, roll back.

Needs a GPU and the vLLM release of its host; shown on 0.26.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.models import make_checkpoint
from tests.support.stock import push_folder
from tests.support.vllm_server import VllmServer
from tests.support.weightsync_server import WeightSyncServer
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

_FLAGS = (
    "--no-enforce-eager",
    "--compilation-config",
    '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}',
    "--gpu-memory-utilization",
    "0.3",
)
_PROMPTS = ("hello world", "the quick brown fox", "a")


def _answers(vllm: VllmServer) -> list[Any]:
    return [vllm.complete(prompt) for prompt in _PROMPTS]


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """A short path, because unix sockets allow 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="ws-"))
    yield folder
    shutil.rmtree(folder)


def test_apply_and_rollback_answer_like_fresh_engines(root: Path) -> None:
    sizes = {"dtype": "bfloat16", "hidden": 1024, "layers": 8, "shard_size": "100MB"}
    first = make_checkpoint(root / "a", seed=0, **sizes)  # type: ignore[arg-type]  # plain values
    second = make_checkpoint(root / "b", seed=1, **sizes)  # type: ignore[arg-type]
    alone = VllmServer(second, root / "alone", dtype="bfloat16", bridge=False, flags=_FLAGS)
    alone.start()
    try:
        wanted = _answers(alone)
    finally:
        alone.stop()
    vllm = VllmServer(first, root / "run", dtype="bfloat16", flags=_FLAGS)
    server = WeightSyncServer(root / "run", root / "state", flags=("--store", "memory://"))
    server.start()
    try:
        vllm.start()
        assert server.wait_serving().live_version == 1
        before = _answers(vllm)
        assert before != wanted
        commit = push_folder(server.stub, second)
        request = pb.ApplyVersionRequest(model="default")
        report = server.stub.ApplyVersion(request, timeout=60).report
        print(report)  # noqa: T201 - the phases are worth reading
        assert {rank.content_digest for rank in report.ranks} == {commit.content_digest}
        assert _answers(vllm) == wanted
        verify = pb.VerifyVersionRequest(model="default")
        assert server.stub.VerifyVersion(verify, timeout=60).verified
        server.stub.Rollback(pb.RollbackRequest(model="default"), timeout=60)
        assert _answers(vllm) == before
    finally:
        server.stop()
        vllm.stop()
