"""Bytes that are no message, and messages over the limits: refused, told why, and no alarm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest

from tests.support.bounds import begin, one_shard, serving
from tests.support.refusals import refusal
from weightsync.errors import Reason
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.weightsync_server import WeightSyncServer

CODE = grpc.StatusCode
MIB = 1 << 20

pytestmark = pytest.mark.timeout(120)

#: By what is wrong with it; a JoinPush whose id is no UTF-8, a chunk that is longer than its bytes.
_NO_MESSAGE = {
    "no tag": b"\xff\xff\xff\xff",
    "no UTF-8": b"\x12\x04\x0a\x02\xff\xfe",
    "cut off": b"\x22\x7f\x08\x01",
}


@pytest.fixture(scope="module", params=[0, 1], ids=["server", "ingest process"])
def server(request: pytest.FixtureRequest) -> Iterator[WeightSyncServer]:
    # Refused streams leave their pushes open.
    with serving(f"--ingest={request.param}", "--slots=16", "--max-pushes=16") as one:
        one.ingest = request.param
        yield one


def _raw(server: WeightSyncServer) -> grpc.Channel:
    address = f"{server.address}.1" if server.ingest else server.address
    return grpc.insecure_channel(address, [("grpc.max_send_message_length", -1)])


def _sent(server: WeightSyncServer, *messages: bytes) -> tuple[grpc.StatusCode, Reason]:
    with _raw(server) as channel:
        push: Any = channel.stream_unary("/weightsync.v1.WeightSync/PushWeights")
        return refusal(lambda: push(iter(messages), timeout=20))


def _nobody_is_called(server: WeightSyncServer) -> None:
    status = server.stub.GetStatus(pb.GetStatusRequest(), timeout=5)
    assert not any(status.invariant_violations.values()), status.invariant_violations
    assert "CRITICAL" not in server.log
    assert "ERROR" not in server.log


@pytest.mark.parametrize("where", ["first", "later"])
@pytest.mark.parametrize("what", _NO_MESSAGE)
def test_bytes_that_are_no_message(server: WeightSyncServer, what: str, where: str) -> None:
    opening = pb.PushWeightsRequest(begin=begin()).SerializeToString()
    before = [opening] if where == "later" else []
    told = _sent(server, *before, _NO_MESSAGE[what])
    assert told == (CODE.INVALID_ARGUMENT, Reason.REQUEST_INVALID)
    _nobody_is_called(server)


@pytest.mark.parametrize("size", [3 * MIB, 5 * MIB, 15 * MIB])
def test_a_chunk_over_the_limit(server: WeightSyncServer, size: int) -> None:
    shard = one_shard(MIB)
    messages = [pb.PushWeightsRequest(begin=begin()), *shard.layout()]
    messages.append(pb.PushWeightsRequest(chunk=pb.Chunk(data=bytes(size))))
    code, reason = _sent(server, *(message.SerializeToString() for message in messages))
    if size > 4 * MIB:
        assert (code, reason) == (CODE.RESOURCE_EXHAUSTED, Reason.LIMIT_EXCEEDED)
    else:
        assert (code, reason) == (CODE.INVALID_ARGUMENT, Reason.REQUEST_INVALID)
    _nobody_is_called(server)


def test_a_request_over_the_limit(server: WeightSyncServer) -> None:
    request = pb.AcquireEpochRequest(model="default", holder="x" * 5 * MIB)
    told = refusal(lambda: server.stub.AcquireEpoch(request, timeout=20))
    assert told == (CODE.RESOURCE_EXHAUSTED, Reason.LIMIT_EXCEEDED)
    _nobody_is_called(server)
