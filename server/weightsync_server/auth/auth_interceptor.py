"""Authority before anything else: no handler runs, and no message is read, without it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from weightsync.errors import Reason, WeightSyncError, invalid_request
from weightsync.wire.rpc_status import release_with_call, to_status
from weightsync_server.auth.admission import Admission, Proofs
from weightsync_server.auth.audit import noting
from weightsync_server.auth.caller import AskedRequests, Caller

_T = TypeVar("_T")

#: Seconds from the begin of a call to its one request.
_REQUEST_S = 10.0
#: A chunk of 2 MiB and its envelope fit; nothing larger is legal.
MAX_MESSAGE_BYTES = (4 << 20) + (64 << 10)


class AdmittedContext:
    def __init__(self, context: Any, caller: Caller) -> None:
        self.caller = caller
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class AuthorityInterceptor(grpc.aio.ServerInterceptor):
    """Has every call admitted before it is read; must be the first one."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return a handler that asks before it reads; also for methods that do not exist."""
        handler = await continuation(handler_call_details)
        entry = _Entry(self.admission, handler_call_details.method, handler)
        if handler is None or handler.response_streaming:
            make, serve = grpc.stream_stream_rpc_method_handler, entry.stream
        else:
            make, serve = grpc.stream_unary_rpc_method_handler, entry.answer
        # Every method takes its requests as a stream: the first is read by us, when all is well.
        parse = handler.request_deserializer if handler and handler.request_streaming else None
        return make(
            serve,
            request_deserializer=reader(parse) if parse else None,
            response_serializer=handler.response_serializer if handler else None,
        )


def reader(parse: Callable[[bytes], _T]) -> Callable[[bytes], _T]:
    """Return what reads a message from outside as `parse` does, and refuses what it cannot be.

    Raises LIMIT_EXCEEDED if it is too large, unread; REQUEST_INVALID if it is none.
    """

    def read(data: bytes) -> _T:
        if len(data) > MAX_MESSAGE_BYTES:
            raise WeightSyncError(
                Reason.LIMIT_EXCEEDED,
                f"the message has {len(data)} bytes; send chunks of at most 2 MiB and other "
                "messages of at most 1 MiB",
            )
        try:
            return parse(data)
        except DecodeError:
            raise invalid_request(
                f"generate the stubs again: the {len(data)} bytes sent are not the message that "
                "the proto defines"
            ) from None

    return read


class _Entry:
    def __init__(
        self,
        admission: Admission,
        method: str,
        handler: grpc.RpcMethodHandler[Any, Any] | None,
    ) -> None:
        self._admission = admission
        self._method = method
        self._handler = handler

    async def answer(self, requests: AsyncIterator[Any], context: Any) -> Any:
        async with _ending(requests) as messages:
            async with _refusing(context):
                caller, request = await self._enter(messages, context)
            inner: Any = self._inner()
            with noting(self._admission.audit, caller, context.code):
                return await inner(request, AdmittedContext(context, caller))

    async def stream(self, requests: AsyncIterator[Any], context: Any) -> None:
        async with _ending(requests) as messages:
            async with _refusing(context):
                caller, request = await self._enter(messages, context)
            inner: Any = self._inner()
            with noting(self._admission.audit, caller, context.code):
                responses = inner(request, AdmittedContext(context, caller))
                if not hasattr(responses, "__aiter__"):
                    # Writes to the context itself, as the health service does.
                    await responses
                    return
                async with contextlib.aclosing(responses):
                    async for response in responses:
                        await context.write(response)

    def _inner(self) -> Any:
        handler = self._handler
        return handler and (
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream
        )

    async def _enter(self, requests: AsyncIterator[Any], context: Any) -> tuple[Caller, Any]:
        """Return who calls and the request, or the stream of requests."""
        caller = self._admission.admit(_proofs(context), self._method, context.time_remaining())
        if self._handler is None:
            raise WeightSyncError(Reason.NOT_SUPPORTED, "this server does not serve that method")
        if self._handler.request_streaming:
            return caller, AskedRequests(requests, caller)
        request = await self._one(requests)
        self._admission.check(caller, request)
        return caller, request

    async def _one(self, requests: AsyncIterator[Any]) -> Any:
        try:
            async with asyncio.timeout(_REQUEST_S):
                data = await anext(aiter(requests), None)
        except TimeoutError:
            raise WeightSyncError(
                Reason.DEADLINE_EXCEEDED,
                f"no request arrived within {_REQUEST_S:g} s of the start of the call; call again",
            ) from None
        if data is None:
            raise invalid_request("send a request: the call ended without one")
        parse: Any = self._handler and self._handler.request_deserializer
        return reader(parse)(data) if parse else data


def _proofs(context: Any) -> Proofs:
    certificate = context.auth_context()
    return Proofs(
        context.peer(),
        tuple(context.invocation_metadata() or ()),
        _decoded(certificate.get("x509_subject_alternative_name", ())),
        _decoded(certificate.get("x509_common_name", ())),
    )


def _decoded(names: Sequence[bytes]) -> list[str]:
    return [name.decode(errors="replace") for name in names]


@contextlib.asynccontextmanager
async def _refusing(context: Any) -> AsyncIterator[None]:
    try:
        yield
    except WeightSyncError as error:
        await context.abort_with_status(to_status(error))


@contextlib.asynccontextmanager
async def _ending(requests: AsyncIterator[Any]) -> AsyncIterator[AsyncIterator[Any]]:
    """Yield the requests of a call; they, and what refuses it, keep nothing alive after it."""
    try:
        # grpc.aio's generator, which holds its call until it has ended.
        async with contextlib.aclosing(aiter(requests)) as messages:  # type: ignore[type-var]
            yield messages
    except grpc.aio.AbortError as error:
        release_with_call(error)
        raise
