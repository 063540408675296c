"""Requests that no trainer would send, and how each must be refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from tests.soak.callers import MODEL
from tests.support.stock import push_messages
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ATTACKS"]

_CODE = grpc.StatusCode


def _hostile(data: bytes, header: int, **begin: Any) -> Callable[[Any, int], object]:
    def send(stub: Any, version: int) -> object:
        layout = pb.LayoutPart(
            shard=0, shard_name="x", size_bytes=len(data), header_bytes=header, last=True
        )
        layout.tensors.add(name="w", dtype="U8", shape=[4], begin=0, end=4)
        messages = [
            pb.PushWeightsRequest(begin=pb.BeginPushRequest(model=MODEL, version=version, **begin)),
            pb.PushWeightsRequest(layout=layout),
            pb.PushWeightsRequest(chunk=pb.Chunk(shard=0, offset=0, data=data)),
            pb.PushWeightsRequest(commit=pb.CommitPushRequest()),
        ]
        return stub.PushWeights(iter(messages), timeout=10)

    return send


_HEADER = b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
_GOOD = len(_HEADER).to_bytes(8, "little") + _HEADER + b"abcd"
_PICKLE = len(_HEADER).to_bytes(8, "little") + b"\x80\x04c__builtin__\neval\n".ljust(len(_HEADER))
_INVALID = (_CODE.INVALID_ARGUMENT,)

#: Name: the call, and the statuses that are right.
ATTACKS: dict[str, tuple[Callable[[Any, int], object], tuple[grpc.StatusCode, ...]]] = {
    "a number that leaves none above it": (
        lambda stub, _: stub.BeginPush(
            pb.BeginPushRequest(model=MODEL, version=(1 << 53) - 1), timeout=10
        ),
        (_CODE.OUT_OF_RANGE,),
    ),
    "a model with a path in its name": (
        lambda stub, _: stub.DeleteVersion(
            pb.DeleteVersionRequest(model="../../etc", version=1), timeout=10
        ),
        (_CODE.NOT_FOUND,),
    ),
    # A real engine that serves is asked first whether it has a place for the tensor: it has none.
    "a pickle for a header": (
        _hostile(_PICKLE + b"abcd", len(_HEADER)),
        (*_INVALID, _CODE.FAILED_PRECONDITION),
    ),
    "a header longer than its shard": (_hostile(_GOOD, 1 << 40), _INVALID),
    "a digest of another kind": (
        lambda stub, _: stub.CommitPush(
            pb.CommitPushRequest(push_id="x" * 32, content_digest="md5:0"), timeout=10
        ),
        (*_INVALID, _CODE.NOT_FOUND),
    ),
    "an epoch that was never issued": (
        lambda stub, version: stub.PushWeights(
            push_messages([("x", _GOOD)], version, epoch=1 << 40), timeout=10
        ),
        (_CODE.FAILED_PRECONDITION,),
    ),
    "a page token of somebody else": (
        lambda stub, _: stub.ListVersions(
            pb.ListVersionsRequest(model=MODEL, page_token="../1"), timeout=10
        ),
        _INVALID,
    ),
    "a message over the limit": (
        lambda stub, _: stub.PushWeights(
            iter([pb.PushWeightsRequest(chunk=pb.Chunk(data=bytes(8 << 20)))]), timeout=10
        ),
        (_CODE.RESOURCE_EXHAUSTED,),
    ),
}
