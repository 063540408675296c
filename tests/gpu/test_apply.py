"""The main path on a CUDA vLLM with CUDA graphs: adopt, push, apply, verify, roll back, sleep.

Needs a GPU and the vLLM release of its host; shown on 0.26.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from tests.support.models import make_checkpoint, nudge_checkpoint
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
_SIZES: dict[str, Any] = {
    "dtype": "bfloat16", "hidden": 1024, "layers": 8, "shard_size": "100MB",
}  # fmt: skip
_PROMPTS = ("hello world", "the quick brown fox", "a")


def _answers(vllm: VllmServer) -> list[Any]:
    return [vllm.complete(prompt) for prompt in _PROMPTS]


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """A short path, because unix sockets allow 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="ws-"))
    yield folder
    shutil.rmtree(folder)


class Site:
    """A CUDA vLLM that may sleep, a server beside it, and checkpoints of one layout."""

    def __init__(self, root: Path) -> None:
        self.first, self.second = (
            make_checkpoint(root / name, seed=seed, **_SIZES) for seed, name in enumerate("ab")
        )
        #: Differs from the second one in few values.
        self.near = nudge_checkpoint(self.second, root / "near")
        self.vllm = VllmServer(
            self.first,
            root / "run",
            dtype="bfloat16",
            flags=(*_FLAGS, "--enable-sleep-mode"),
            # For /sleep only; our own servers never need it.
            variables={"VLLM_SERVER_DEV_MODE": "1"},
        )
        self.server = WeightSyncServer(root / "run", root / "state", flags=("--store", "memory://"))

    def apply(self) -> pb.ApplyReport:
        """Make the newest version live."""
        request = pb.ApplyVersionRequest(model="default")
        return self.server.stub.ApplyVersion(request, timeout=60).report


@pytest.fixture(scope="module")
def wanted(root: Path) -> list[Any]:
    """What a fresh engine answers from the second checkpoint."""
    second = make_checkpoint(root / "c", seed=1, **_SIZES)
    alone = VllmServer(second, root / "alone", dtype="bfloat16", bridge=False, flags=_FLAGS)
    alone.start()
    try:
        return _answers(alone)
    finally:
        alone.stop()


@pytest.fixture(scope="module")
def site(root: Path, wanted: list[Any]) -> Iterator[Site]:
    """Start both; the fresh engine has left the GPU."""
    del wanted
    site = Site(root)
    site.server.start()
    try:
        site.vllm.start()
        assert site.server.wait_serving().live_version == 1
        yield site
    finally:
        site.server.stop()
        site.vllm.stop()


def test_apply_and_rollback_answer_like_fresh_engines(site: Site, wanted: list[Any]) -> None:
    before = _answers(site.vllm)
    assert before != wanted
    commit = push_folder(site.server.stub, site.second)
    report = site.apply()
    print(report)  # noqa: T201 - the phases are worth reading
    assert {rank.content_digest for rank in report.ranks} == {commit.content_digest}
    assert _answers(site.vllm) == wanted
    verify = pb.VerifyVersionRequest(model="default")
    assert site.server.stub.VerifyVersion(verify, timeout=60).verified
    site.server.stub.Rollback(pb.RollbackRequest(model="default"), timeout=60)
    assert _answers(site.vllm) == before


def _checked(site: Site) -> int:
    """Wait until the live parameters were compared as a whole; return the outcome."""
    request = pb.GetVersionRequest(model="default")
    end = time.monotonic() + 60
    while True:
        check = site.server.stub.GetVersion(request, timeout=10).version.live_check
        if check != pb.LIVE_CHECK_PENDING:
            return check
        assert time.monotonic() < end, "it was not compared within a minute"
        time.sleep(0.05)


def test_a_patch_and_its_rollback_answer_like_fresh_engines(site: Site, wanted: list[Any]) -> None:
    push_folder(site.server.stub, site.near)
    assert site.apply().strategy == pb.APPLY_STRATEGY_COPY
    near = _answers(site.vllm)
    assert near != wanted
    push_folder(site.server.stub, site.second)
    report = site.apply()
    print(report)  # noqa: T201 - the phases are worth reading
    assert report.strategy == pb.APPLY_STRATEGY_PATCH
    assert _answers(site.vllm) == wanted
    assert _checked(site) == pb.LIVE_CHECK_PASSED
    back = site.server.stub.Rollback(pb.RollbackRequest(model="default"), timeout=60).report
    assert (back.strategy, back.written_bytes) == (pb.APPLY_STRATEGY_PATCH, report.written_bytes)
    assert _answers(site.vllm) == near
    assert _checked(site) == pb.LIVE_CHECK_PASSED
    status = site.server.stub.GetStatus(pb.GetStatusRequest(), timeout=10)
    assert not any(status.invariant_violations.values())


def test_sleeping_engine_refuses_an_apply_and_takes_it_once_awake(
    site: Site, wanted: list[Any]
) -> None:
    push_folder(site.server.stub, site.second)
    assert site.vllm.request("/sleep?level=2", {})[0] == 500
    assert site.vllm.request("/sleep?level=1", {})[0] == 200
    with pytest.raises(grpc.RpcError) as caught:
        site.apply()
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "wake the engine up" in str(caught.value.details())
    assert site.vllm.request("/wake_up", {})[0] == 200
    site.apply()
    assert _answers(site.vllm) == wanted
