"""The whole way on a real vLLM: adopt, push, apply, generate, roll back, restart.

One engine for the module. Greedy tokens and logprobs must equal those of a vLLM that was freshly
started from the same checkpoint.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.models import make_checkpoint
from tests.support.scraped import scraped
from tests.support.stock import push_folder
from tests.support.vllm_server import VllmServer
from tests.support.weightsync_server import WeightSyncServer
from weightsync.errors import Reason
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.wire.rpc_status import from_call
from weightsync_client import Client, Probes, TransferPath, versions_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.completion import Completion

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

_PROMPTS = ("hello world", "the quick brown fox", "a")


class Site:
    """A vLLM, a server beside it and three checkpoints of one layout."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.checkpoints = [
            make_checkpoint(root / f"checkpoint-{name}", dtype="bfloat16", seed=seed)
            for seed, name in enumerate("abc")
        ]
        self.vllm = VllmServer(self.checkpoints[0], root / "run", dtype="bfloat16")
        self.alone = VllmServer(self.checkpoints[1], root / "alone", dtype="bfloat16", bridge=False)
        flags = ("--same-host", "--metrics", "127.0.0.1:0")
        self.server = WeightSyncServer(root / "run", root / "state", flags=flags)

    def texts(self) -> list[Any]:
        """Greedy tokens and logprobs of every prompt."""
        return answers(self.vllm)


def answers(vllm: VllmServer) -> list[Any]:
    """Return greedy tokens with their logprobs."""
    return [vllm.complete(prompt) for prompt in _PROMPTS]


def reason(error: grpc.RpcError) -> Reason:
    """Return the reason that a failed call names."""
    told = from_call(error)
    assert told is not None, error
    return told.reason


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """Start everything; the server first, so that vLLM comes up to one that waits."""
    # Unix sockets allow 107 bytes, which pytest's own folders exceed.
    root = Path(tempfile.mkdtemp(prefix="ws-"))
    site = Site(root)
    try:
        site.server.start()
        site.vllm.launch()
        site.alone.launch()
        site.vllm.ready()
        site.server.wait_serving()
        yield site
    finally:
        site.server.stop()
        site.vllm.stop()
        site.alone.stop()
        shutil.rmtree(root)


@pytest.fixture(scope="module")
def fresh(site: Site) -> list[list[Any]]:
    """What the first two checkpoints answer: the present engine's and a fresh one's answers."""
    found = [site.texts(), answers(site.alone.ready())]
    site.alone.stop()
    assert found[0] != found[1]
    return found


def test_the_checkpoint_is_adopted_as_the_first_version(site: Site) -> None:
    model = site.server.wait_serving()
    assert model.live_version == 1
    assert [rank.version for rank in model.engine.ranks] == [1]
    assert model.epoch == 0


def test_push_and_apply_answer_like_a_fresh_engine(site: Site, fresh: list[list[Any]]) -> None:
    stub = site.server.stub
    commit = push_folder(stub, site.checkpoints[1])
    assert commit.version == 2
    assert site.texts() == fresh[0]
    report = stub.ApplyVersion(pb.ApplyVersionRequest(model="default"), timeout=60).report
    assert report.outcome == pb.APPLY_OUTCOME_APPLIED
    assert report.version == 2
    assert report.previous_version == 1
    assert {rank.content_digest for rank in report.ranks} == {commit.content_digest}
    assert report.phases.commit.ToNanoseconds() > 0
    assert report.phases.verify.ToNanoseconds() > 0
    assert site.texts() == fresh[1]


def test_verify_proves_what_is_live_and_denies_what_is_not(site: Site) -> None:
    stub = site.server.stub
    assert stub.VerifyVersion(pb.VerifyVersionRequest(model="default"), timeout=60).verified
    other = stub.VerifyVersion(pb.VerifyVersionRequest(model="default", version=1), timeout=60)
    assert not other.verified
    assert other.ranks[0].error


def test_rollback_goes_back_and_newest_skips_what_was_left(
    site: Site, fresh: list[list[Any]]
) -> None:
    stub = site.server.stub
    answer = stub.Rollback(pb.RollbackRequest(model="default", reason="worse"), timeout=60)
    assert answer.rejected_version == 2
    assert answer.report.version == 1
    assert site.texts() == fresh[0]
    again = stub.ApplyVersion(pb.ApplyVersionRequest(model="default"), timeout=60).report
    assert again.outcome == pb.APPLY_OUTCOME_ALREADY_LIVE
    with pytest.raises(grpc.RpcError) as caught:
        stub.ApplyVersion(pb.ApplyVersionRequest(model="default", version=2), timeout=60)
    assert reason(caught.value) is Reason.VERSION_REJECTED


def _segment_of(pid: int, needle: bytes) -> tuple[mmap.mmap, int]:
    """Map the segment of a process that holds these bytes, writable, as a fault would reach it."""
    folder = Path(f"/proc/{pid}/fd")
    for link in folder.iterdir():
        if "memfd:weightsync" in str(link.readlink()):
            fd = os.open(link, os.O_RDWR)
            memory = mmap.mmap(fd, 0)
            os.close(fd)
            if (at := memory.find(needle)) >= 0:
                return memory, at
            memory.close()
    raise LookupError("no segment holds these bytes")


def test_a_bit_flipped_in_a_staged_segment_is_caught_before_the_pause(
    site: Site, fresh: list[list[Any]]
) -> None:
    stub = site.server.stub
    commit = push_folder(stub, site.checkpoints[2])
    shard = min(site.checkpoints[2].glob("*.safetensors")).read_bytes()
    assert site.server.process is not None
    memory, at = _segment_of(site.server.process.pid, shard[-4096:])
    memory[at + 100] ^= 1
    live = site.server.wait_serving().live_version
    request = pb.ApplyVersionRequest(model="default", version=commit.version)
    with pytest.raises(grpc.RpcError) as caught:
        stub.ApplyVersion(request, timeout=60)
    assert caught.value.code() is grpc.StatusCode.DATA_LOSS
    assert reason(caught.value) is Reason.DATA_CORRUPT
    assert site.server.wait_serving().live_version == live
    assert site.texts() == fresh[0]
    # The store still has the bytes that were acknowledged.
    assert stub.ApplyVersion(request, timeout=60).report.version == commit.version
    back = pb.RollbackRequest(model="default", reason="end of the test")
    assert stub.Rollback(back, timeout=60).report.version == live


@pytest.mark.parametrize("cache", [pb.CACHE_MODE_KEEP, pb.CACHE_MODE_RECOMPUTE])
def test_a_request_in_flight_goes_on_through_an_apply(site: Site, cache: Any) -> None:
    stub = site.server.stub
    found: list[Completion] = []
    asking = threading.Thread(target=lambda: found.append(site.vllm.complete("hello", 300)))
    asking.start()
    commit = push_folder(stub, site.checkpoints[1 if cache == pb.CACHE_MODE_KEEP else 2])
    # By its number: the tests above rolled this content back, so that "newest" passes over it.
    request = pb.ApplyVersionRequest(model="default", version=commit.version)
    request.pause.cache = cache
    report = stub.ApplyVersion(request, timeout=60).report
    assert report.outcome == pb.APPLY_OUTCOME_APPLIED
    assert report.pause.cache == cache
    asking.join(timeout=120)
    assert len(found[0].names) == 300


class _Census:
    """What the server's and vLLM's processes hold."""

    def __init__(self, site: Site) -> None:
        assert site.server.process is not None
        assert site.vllm.process is not None
        roots = (site.server.process.pid, site.vllm.process.pid)
        parents = [psutil.Process(pid) for pid in roots]
        processes = [p for parent in parents for p in (parent, *parent.children(recursive=True))]
        self.descriptors = sum(process.num_fds() for process in processes)
        self.threads = sum(process.num_threads() for process in processes)
        self.anonymous = sum(_anonymous(process.pid) for process in processes)
        status = site.server.stub.GetStatus(pb.GetStatusRequest(), timeout=5)
        self.reserved = status.memory_reserved_bytes


def _anonymous(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


# It counts descriptors and memory.
@pytest.mark.alone
def test_a_hundred_pushes_and_applies_leave_nothing_behind(site: Site) -> None:
    stub = site.server.stub

    def cycle(turn: int) -> None:
        commit = push_folder(stub, site.checkpoints[turn % 2])
        request = pb.ApplyVersionRequest(model="default", version=commit.version)
        assert stub.ApplyVersion(request, timeout=60).report.outcome == pb.APPLY_OUTCOME_APPLIED

    for turn in range(5):
        cycle(turn)
    before = _Census(site)
    for turn in range(100):
        cycle(turn + 1)
    after = _Census(site)
    # A channel or a worker of a thread pool comes and goes.
    assert abs(after.descriptors - before.descriptors) <= 8
    assert abs(after.threads - before.threads) <= 8
    assert after.reserved == before.reserved
    assert after.anonymous - before.anonymous < 64 << 20


def test_a_restarted_server_finds_the_live_version_by_asking_the_ranks(
    site: Site, fresh: list[list[Any]]
) -> None:
    stub = site.server.stub
    version = push_folder(stub, site.checkpoints[1]).version
    stub.ApplyVersion(pb.ApplyVersionRequest(model="default", version=version), timeout=60)
    site.server.kill()
    # The engine goes on with what it serves.
    assert site.texts() == fresh[1]
    site.server.start()
    assert site.server.wait_serving().live_version == version
    stub = site.server.stub
    assert stub.VerifyVersion(pb.VerifyVersionRequest(model="default"), timeout=60).verified
    assert site.texts() == fresh[1]


def test_what_a_trainer_on_this_host_writes_is_what_is_served(
    site: Site, fresh: list[list[Any]]
) -> None:
    site.server.wait_serving()
    with Client(site.server.address) as client:
        # In the end the same is live as before: both slots have held what was written.
        for number in (0, 1, 0, 1):
            pushed = client.push(site.checkpoints[number], delta="never")
            assert (pushed.way, pushed.way_reason) == (TransferPath.SAME_HOST, "")
            report = client.apply(pushed.version)
            assert {rank.content_digest for rank in report.ranks} == {pushed.content_digest}
            assert site.texts() == fresh[number]


def test_a_restarted_engine_serves_the_live_version_and_not_its_disk(
    site: Site, fresh: list[list[Any]]
) -> None:
    live = site.server.wait_serving().live_version
    site.vllm.stop()
    site.vllm.start()
    assert site.server.wait_serving().live_version == live
    assert site.texts() == fresh[1]


def test_a_trainer_reports_how_far_it_is_from_what_was_sampled(site: Site) -> None:
    own, other = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        for folder in site.checkpoints[1:]
    )
    order = {"model": "model", "prompt": list(_PROMPTS), "max_tokens": 32, "ignore_eos": True}
    order |= {"temperature": 1.0, "logprobs": 0, "return_token_ids": True}
    with Client(site.server.address) as client:
        version = client.push(own).version
        client.apply(version)
        with site.vllm.ask("/v1/completions", order, {"x-weightsync-spans": "1"}) as answer:
            versions, choices = versions_of(answer), json.load(answer)["choices"]
        served = [choice["logprobs"]["token_logprobs"] for choice in choices]
        prompts = [choice["prompt_token_ids"] for choice in choices]
        whole = [
            prompt + choice["token_ids"] for prompt, choice in zip(prompts, choices, strict=True)
        ]

        def gap(model: Any, lag: int) -> float:
            """What the server shows of a trainer with this model."""
            probes = Probes.of(model, whole)
            ours = [
                logprobs[len(prompt) - 1 :]
                for logprobs, prompt in zip(probes.logprobs, prompts, strict=True)
            ]
            trained = version + lag
            assert client.report_logprobs(versions, served, ours, trained_version=trained) == 96
            named = {"version": str(version), "lag": str(lag)}
            return scraped(site.server.log, "weightsync_logprob_gap", **named)

        near = gap(own, 0)
        client.push(other)
        far = gap(other, 1)
    # Of this model, whose logits are large, rounding to bfloat16 alone makes 0.15.
    assert near < 0.3
    assert far > 1.0
