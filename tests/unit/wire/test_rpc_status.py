from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf import empty_pb2

from weightsync.errors import Reason, WeightSyncError
from weightsync.wire.rpc_status import from_call, to_status

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@asynccontextmanager
async def _refusing(error: WeightSyncError) -> AsyncIterator[int]:
    """A real server whose one method fails with `error`."""

    async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort_with_status(to_status(error))

    handler = grpc.unary_unary_rpc_method_handler(
        refuse,
        request_deserializer=empty_pb2.Empty.FromString,
        response_serializer=empty_pb2.Empty.SerializeToString,
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"Do": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


async def _told(error: WeightSyncError) -> grpc.aio.AioRpcError:
    async with (
        _refusing(error) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        call: Any = channel.unary_unary("/t.T/Do")
        with pytest.raises(grpc.aio.AioRpcError) as told:
            await call(b"", timeout=10)
        return told.value


async def test_the_other_side_gets_the_same_error() -> None:
    error = WeightSyncError(
        Reason.NO_SLOT,
        "no slot became free; lower the rate \N{SNOWMAN}",
        metadata={"slots": "2", "größe": "7"},
        retry_after_s=1.25,
    )
    told = await _told(error)
    assert told.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert told.details() == error.message
    back = from_call(told)
    assert back is not None
    assert (back.reason, back.message) == (error.reason, error.message)
    assert (back.metadata, back.retry_after_s) == (error.metadata, 1.25)


async def test_without_a_retry_there_is_none() -> None:
    back = from_call(await _told(WeightSyncError(Reason.EPOCH_STALE, "stale")))
    assert back is not None
    assert back.retry_after_s is None


async def test_the_sync_api_reads_it_too() -> None:
    async with _refusing(WeightSyncError(Reason.FAULT, "fault")) as port:

        def call() -> WeightSyncError | None:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                do: Any = channel.unary_unary("/t.T/Do")
                with pytest.raises(grpc.RpcError) as told:
                    do(b"", timeout=10)
                return from_call(told.value)

        back = await asyncio.to_thread(call)
    assert back is not None
    assert back.reason is Reason.FAULT


async def test_a_long_sentence_is_cut_not_lost() -> None:
    # gRPC refuses trailers above 8 KiB and then shows an error of its own.
    names = ", ".join(f"model.layers.{i}.self_attn.q_proj.weight" for i in range(1000))
    told = await _told(WeightSyncError(Reason.ENGINE_REFUSED, f"missing: {names}"))
    assert told.code() is grpc.StatusCode.FAILED_PRECONDITION
    back = from_call(told)
    assert back is not None
    assert back.message.startswith("missing: model.layers.0.")
    assert back.message.endswith("...")


async def test_a_sentence_that_is_no_text_still_arrives() -> None:
    back = from_call(await _told(WeightSyncError(Reason.LAYOUT_INVALID, "tensor \ud800 is odd")))
    assert back is not None
    assert back.message == "tensor \\ud800 is odd"


class _Call:
    def __init__(self, **trailing: bytes) -> None:
        self._trailing = tuple((k.replace("_", "-"), v) for k, v in trailing.items())

    def trailing_metadata(self) -> Any:
        return self._trailing or None


def test_errors_of_others_are_not_ours() -> None:
    assert from_call(_Call()) is None
    assert from_call(_Call(grpc_status_details_bin=b"\xff\xff garbage")) is None
    assert from_call(_Call(grpc_status_details_bin=b"")) is None
