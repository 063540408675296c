"""Peers that die, freeze or fall silent: noticed in time, and their pushes can be taken up."""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

import weightsync_client.transport.shard_queue
from benchmarks.servers import free_port
from tests.support.bounds import (
    MODEL,
    Message,
    begin,
    model_status,
    one_shard,
    push_messages,
    serving,
    within,
)
from tests.support.weightsync_server import WeightSyncServer
from weightsync.errors import Reason
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import Client
from weightsync_client.errors import from_rpc

CODE = grpc.StatusCode
#: Longest wait for what comes at once, on a machine with other work to do.
SOON_S = 30.0


@contextlib.contextmanager
def half_push(address: str) -> Iterator[subprocess.Popen[bytes]]:
    """A trainer in a process of its own that has sent half of its bytes."""
    trainer = subprocess.Popen(
        [sys.executable, "-m", "tests.support.half_push", address], stdout=subprocess.PIPE
    )
    try:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"half\n"
        yield trainer
    finally:
        trainer.kill()
        trainer.communicate()


def streams(server: WeightSyncServer) -> Callable[[], list[int]]:
    stub = server.stub
    return lambda: [push.streams for push in model_status(stub).pushes]


def half_here(server: WeightSyncServer) -> bool:
    """Tell whether what two trainers have sent has come."""
    pushes = model_status(server.stub).pushes
    return [push.received_bytes for push in pushes] == [1 << 19] * 2


@pytest.mark.parametrize(
    "seconds",
    [
        # Not by the time without a message, which is 60 s.
        pytest.param(SOON_S, id="noticed"),
        pytest.param(10.0, id="noticed within 10 s", marks=pytest.mark.alone),
    ],
)
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_peer_is_noticed_and_its_push_goes_on(blow: signal.Signals, seconds: float) -> None:
    tcp = f"127.0.0.1:{free_port()}"
    with serving(tcp=tcp) as server:
        stub = server.stub
        count = streams(server)
        with half_push(server.address) as near, half_push(tcp) as far:
            within(SOON_S, lambda: half_here(server))
            for trainer in (near, far):
                trainer.send_signal(blow)
            within(seconds, lambda: count() == [0, 0])
        shard = one_shard(1 << 20)
        for push in model_status(stub).pushes:
            assert push.received_bytes == 1 << 19
            rest = [
                Message(join=pb.JoinPush(push_id=push.push_id)),
                *shard.chunks(start=1 << 19),
                Message(commit=pb.CommitPushRequest()),
            ]
            assert stub.PushWeights(iter(rest), timeout=SOON_S).commit.size_bytes == len(shard.data)


def test_a_killed_trainer_keeps_no_slot_from_others_and_its_push_goes_on() -> None:
    # A push sleeps after a twentieth of this.
    with serving("--push-resume-timeout-s", "40", store="") as server:
        stub = server.stub
        count = streams(server)
        with half_push(server.address), half_push(server.address):
            within(SOON_S, lambda: half_here(server))
        within(SOON_S, lambda: count() == [0, 0])
        pushes = model_status(stub).pushes
        shard = one_shard(1 << 20)
        others = [stub.BeginPush(begin(version=number), timeout=SOON_S) for number in (10, 11)]
        for other in others:
            stub.AbortPush(pb.AbortPushRequest(push_id=other.push_id), timeout=SOON_S)
        for push in sorted(pushes, key=lambda push: push.version):
            # Half of it was here, and still is.
            rest = [
                Message(join=pb.JoinPush(push_id=push.push_id)),
                *shard.chunks(start=1 << 19),
                Message(commit=pb.CommitPushRequest()),
            ]
            assert stub.PushWeights(iter(rest), timeout=SOON_S).commit.version == push.version
            request = pb.PullWeightsRequest(model=MODEL, version=push.version)
            pulled = stub.PullWeights(request, timeout=SOON_S)
            assert b"".join(message.chunk.data for message in pulled) == shard.data


def test_a_silent_stream_is_ended_one_with_heartbeats_is_not() -> None:
    shard = one_shard()
    over = threading.Event()

    def gathers() -> Iterator[Message]:
        yield Message(begin=begin())
        for _ in range(12):
            time.sleep(0.3)  # in all longer than a stream may be silent
            yield Message(heartbeat=pb.Heartbeat())
        yield from shard.all()
        yield Message(commit=pb.CommitPushRequest())

    def silent() -> Iterator[Message]:
        yield Message(begin=begin())
        over.wait(60)

    with serving("--push-idle-timeout-s", "2.4") as server:
        stub = server.stub
        # All that it gathers takes longer than that.
        assert stub.PushWeights(gathers(), timeout=SOON_S).commit.version
        start = time.monotonic()
        with pytest.raises(grpc.RpcError) as caught:
            stub.PushWeights(silent(), timeout=SOON_S)
        assert time.monotonic() - start > 2.4
        over.set()
        error = from_rpc(caught.value, method="PushWeights", address="")
        assert error.code is CODE.DEADLINE_EXCEEDED
        assert "heartbeats" in error.message
        assert error.retry_after_s
        assert [push.streams for push in model_status(stub).pushes] == [0]


def test_the_client_says_that_it_lives_while_its_source_gathers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weightsync_client.transport.shard_queue, "_HEARTBEAT_S", 0.2)

    def gathers() -> Iterator[tuple[str, Any]]:
        for index in range(2):
            # Longer than either timeout, and ten times the interval of heartbeats.
            time.sleep(2.5)
            yield f"t{index}", np.full(1000, index, np.float32)

    flags = ("--push-idle-timeout-s", "2", "--push-resume-timeout-s", "2")
    with serving(*flags) as server, Client(server.address) as client:
        assert client.push(gathers(), shard_bytes=1).tensor_count == 2
        assert client.status().models[0].pushes == ()


def test_100_abandoned_pushes_are_reclaimed() -> None:
    shard = one_shard(1 << 20)
    flags = ("--push-resume-timeout-s", "0.5", "--slots", "16", "--max-pushes", "16")
    with serving(*flags) as server:
        stub = server.stub
        versions = itertools.count(1)
        opened = 0
        while opened < 100:
            try:
                reply = stub.BeginPush(begin(version=next(versions)), timeout=SOON_S)
            except grpc.RpcError as error:
                refusal = from_rpc(error, method="BeginPush", address="")
                assert refusal.code is CODE.RESOURCE_EXHAUSTED
                assert refusal.reason in (Reason.LIMIT_EXCEEDED, Reason.NO_SLOT)
                time.sleep(refusal.retry_after_s or 0)
                continue
            opened += 1
            join = Message(join=pb.JoinPush(push_id=reply.push_id))
            some = iter([join, *shard.layout(), *shard.chunks(1 << 19)[:1]])
            try:
                stub.PushWeights(some, timeout=SOON_S)
            except grpc.RpcError as error:
                # Whoever gets little of the processor comes too late: it is reclaimed already.
                gone = from_rpc(error, method="PushWeights", address="").reason
                assert gone in (Reason.PUSH_ABORTED, Reason.PUSH_UNKNOWN)
        within(SOON_S, lambda: not model_status(stub).pushes)
        assert stub.PushWeights(push_messages(shard), timeout=SOON_S).commit.version
        (model,) = stub.GetStatus(pb.GetStatusRequest(), timeout=SOON_S).models
        assert sum(slot.state == "receiving" for slot in model.slots) == 0
