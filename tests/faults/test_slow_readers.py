"""Readers that are slow, stalled or deaf cost little memory, hold nothing, and are let go."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial

import grpc
import pytest

from benchmarks.servers import descendants, free_port, rss_anon
from tests.support.bounds import (
    FIRST,
    MODEL,
    model_status,
    one_shard,
    push_messages,
    serving,
    within,
)
from tests.support.raw_http2 import RawCall
from tests.support.scraped import scraped
from tests.support.weightsync_server import WeightSyncServer
from weightsync.errors import Reason
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client.errors import from_rpc

pytestmark = pytest.mark.timeout(180)

PULL = "/weightsync.v1.WeightSync/PullWeights"
READERS = 16
#: Longest wait for what comes at once, on a machine with other work to do.
SOON_S = 30.0


def memory(server: WeightSyncServer) -> int:
    assert server.process is not None
    return rss_anon([server.process.pid])


@contextlib.contextmanager
def readers(server: WeightSyncServer, window: int, address: str = "") -> Iterator[list[RawCall]]:
    request = pb.PullWeightsRequest(model=MODEL, version=FIRST, chunk_bytes=2 << 20)
    calls = [RawCall(address or server.address, PULL, request, window) for _ in range(READERS)]
    try:
        yield calls
    finally:
        for call in calls:
            call.close()


def leases(server: WeightSyncServer) -> int:
    return sum(slot.leases for slot in model_status(server.stub).slots)


def begun(server: WeightSyncServer) -> bool:
    """Tell whether every reader has been heard: it has a slot, or had one."""
    return scraped(server.log, "grpc_server_started_total", grpc_method="PullWeights") == READERS


@pytest.mark.parametrize("window", [1 << 16, (1 << 31) - 1], ids=["window", "socket"])
def test_sixteen_slow_readers_cost_at_most_200_mb(window: int) -> None:
    # None is let go for being slow.
    with serving("--reader-timeout-s", "120") as server:
        stub = server.stub
        stub.PushWeights(push_messages(one_shard(64 << 20)), timeout=SOON_S)
        base = peak = memory(server)
        with readers(server, window) as calls:
            end = time.monotonic() + 5
            while time.monotonic() < end or min(call.received for call in calls) < 100_000:
                for call in calls:
                    # 20 KB at a time: some 200 KB/s each.
                    call.read()
                    if window < 1 << 30:
                        call.allow(20_000)
                peak = max(peak, memory(server))
                time.sleep(0.1)  # which makes the rate above
            assert all(not call.ended for call in calls)
            assert model_status(stub).live_version == 0
        assert peak - base < 200e6, f"{(peak - base) / 1e6:.0f} MB"
        within(SOON_S, lambda: leases(server) == 0)


def test_a_stalled_reader_gives_its_slot_back() -> None:
    with serving("--reader-timeout-s", "1", "--slots", "2") as server:
        stub = server.stub
        stub.PushWeights(push_messages(one_shard(4 << 20)), timeout=SOON_S)
        pull = pb.PullWeightsRequest(model=MODEL, version=FIRST)
        with readers(server, 1 << 16) as calls:
            within(SOON_S, lambda: begun(server))
            # They answer pings, so they live; they take nothing.
            stop = threading.Event()

            def answer() -> None:
                while not stop.wait(0.05):
                    for call in calls:
                        call.read()

            thread = threading.Thread(target=answer)
            thread.start()
            try:
                within(SOON_S, lambda: leases(server) == 0)
                # Others are served, and those that read on are told.
                assert list(stub.PullWeights(pull, timeout=SOON_S))
                for call in calls:
                    call.allow(8 << 20)
                within(SOON_S, lambda: all(call.ended for call in calls))
            finally:
                stop.set()
                thread.join()
        for seed in range(3):
            stub.PushWeights(push_messages(one_shard(4 << 20, seed)), timeout=SOON_S)


@pytest.mark.parametrize(("door", "timeout_s"), [("tcp", 300), ("unix", 2)])
def test_deaf_readers_are_dropped(door: str, timeout_s: int) -> None:
    # Their sockets are full, so no ping reaches them: TCP notices it, else the reader timeout does.
    tcp = f"127.0.0.1:{free_port()}"
    with serving("--reader-timeout-s", str(timeout_s), tcp=tcp) as server:
        server.stub.PushWeights(push_messages(one_shard(64 << 20)), timeout=SOON_S)
        with readers(server, (1 << 31) - 1, tcp if door == "tcp" else server.address):
            within(SOON_S, lambda: begun(server))
            within(60, lambda: leases(server) == 0)


def test_fetchers_that_stand_still_hold_a_fast_trainer_back_at_no_cost() -> None:
    with serving(store="") as server:
        assert server.process is not None
        _, *fetchers = descendants(server.process.pid)
        stub = server.stub
        stub.PushWeights(push_messages(one_shard()), timeout=SOON_S)
        base = peak = memory(server)
        for pid in fetchers:
            os.kill(pid, signal.SIGSTOP)
        try:
            call = stub.PushWeights.future(push_messages(one_shard(128 << 20)), timeout=120)
            within(SOON_S, partial(receives, server, 32 << 20))
            for _ in range(20):
                peak = max(peak, memory(server))
                time.sleep(0.05)  # a second in all, in which nothing more may be taken in
            assert not call.done()
            # No more is taken than a crash may cost.
            assert not receives(server, (64 << 20) + 1)
        finally:
            for pid in fetchers:
                os.kill(pid, signal.SIGCONT)
        assert call.result().commit.durable
        assert peak - base < 64e6, f"{(peak - base) / 1e6:.0f} MB"


def receives(server: WeightSyncServer, size: int) -> bool:
    return any(push.received_bytes >= size for push in model_status(server.stub).pushes)


def test_watches_that_never_read_are_dropped_and_bounded() -> None:
    flags = ("--reader-timeout-s", "4", "--max-calls-per-s", "100000")
    with serving(*flags) as server:
        stub = server.stub
        text = {"note": "x" * (15 << 10)}
        stub.PushWeights(push_messages(one_shard(), metadata=text), timeout=SOON_S)
        deaf = [stub.WatchVersions(pb.WatchVersionsRequest(model=MODEL)) for _ in range(READERS)]
        seen = 0
        heard = stub.WatchVersions(pb.WatchVersionsRequest(model=MODEL))

        def listen() -> None:
            nonlocal seen
            with contextlib.suppress(grpc.RpcError):
                for _ in heard:
                    seen += 1

        thread = threading.Thread(target=listen)
        thread.start()

        def caught_up(number: int) -> bool:
            return seen >= number

        within(SOON_S, partial(caught_up, 1))
        base = memory(server)
        changes = 1500
        for number in range(changes):
            pin = pb.PinVersionRequest(model=MODEL, version=FIRST, pinned=number % 2 == 0)
            stub.PinVersion(pin, timeout=SOON_S)
            if number % 100 == 0:
                within(SOON_S, partial(caught_up, number))
        assert memory(server) - base < 200e6
        # One that reads has missed nothing.
        within(SOON_S, partial(caught_up, changes + 1))
        for watch in deaf:
            with pytest.raises(grpc.RpcError) as caught:
                for _ in watch:
                    pass
            error = from_rpc(caught.value, method="WatchVersions", address="")
            assert error.reason in (Reason.DEADLINE_EXCEEDED, Reason.LIMIT_EXCEEDED)
        heard.cancel()
        thread.join()
        assert stub.PushWeights(push_messages(one_shard(1)), timeout=SOON_S).commit.version
