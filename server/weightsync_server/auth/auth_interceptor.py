"""Authority before anything else: no handler runs, and no message is read, without it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError

from weightsync.errors import Reason, WeightSyncError
from weightsync.wire.rpc_status import release_with_call, to_status
from weightsync_server.auth.caller import CALLER, Caller, RejectedCall
from weightsync_server.auth.roles import RULES, Role

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from weightsync_server.auth.authenticator import Authenticator
    from weightsync_server.auth.principals import Principal
    from weightsync_server.auth.roles import Rule

__all__ = [
    "MAX_MESSAGE_BYTES",
    "Auditor",
    "AuthorityInterceptor",
    "noting",
    "reader",
    "rule_for",
]

_T = TypeVar("_T")

#: Seconds from the begin of a call to its one request.
_REQUEST_S = 10.0
#: A chunk of 2 MiB and its envelope fit; nothing larger is legal.
MAX_MESSAGE_BYTES = (4 << 20) + (64 << 10)


class Auditor(Protocol):
    """Is told of every end; `weightsync_server.auth.audit.Audit` writes it down."""

    def refuse(self, error: WeightSyncError, attempt: RejectedCall, times: int = 1) -> None:
        """A call was refused at the door, or so many alike were."""

    def write(self, caller: Caller, outcome: str) -> None:
        """A call that had begun its work has ended."""


class AuthorityInterceptor(grpc.aio.ServerInterceptor):
    """Admits calls of principals that have the role, and nobody else. Must be the first one.

    Args:
        gate: Tells who calls.
        model: The one model of this server: whoever has no authority over it has none here.
        audit: Told of every end.
    """

    def __init__(self, gate: Authenticator, model: str, audit: Auditor) -> None:
        self.gate = gate
        self.model = model
        self.audit = audit

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return a handler that asks before it reads; also for methods that do not exist."""
        handler = await continuation(handler_call_details)
        entry = _Entry(self, handler_call_details.method, handler)
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

    It raises WeightSyncError: LIMIT_EXCEEDED for one that is too large, unread, and REQUEST_INVALID
    for bytes that are no such message.
    """

    def read(data: bytes) -> _T:
        if len(data) > MAX_MESSAGE_BYTES:
            raise WeightSyncError(
                Reason.LIMIT_EXCEEDED,
                f"a message of {len(data)} bytes; send chunks of at most 2 MiB and other messages "
                "of at most 1 MiB",
            )
        try:
            return parse(data)
        except DecodeError:
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                f"{len(data)} bytes that are not the message which the proto says; generate the "
                "stubs again",
            ) from None

    return read


def rule_for(principal: Principal, method: str, model: str) -> Rule:
    """Return the rule by which a principal may call a method.

    Args:
        principal: Who calls.
        method: Exact path.
        model: The one model of this server.

    Raises:
        WeightSyncError: PERMISSION_DENIED, naming the role that it takes; NOT_SUPPORTED.
    """
    if not principal.covers(model):
        raise _denied(f"{principal.name} has no authority over the model of this server")
    rule = RULES.get(method)
    if rule is None:
        raise WeightSyncError(Reason.NOT_SUPPORTED, "this server has no such method; see its proto")
    if not rule.allows(principal.roles):
        needed = " or ".join(sorted(rule.roles | {Role.ADMIN}))
        raise _denied(f"{principal.name} may not call {method}; it takes role {needed}")
    return rule


class _Entry:
    """One call on its way in."""

    def __init__(
        self,
        door: AuthorityInterceptor,
        method: str,
        handler: grpc.RpcMethodHandler[Any, Any] | None,
    ) -> None:
        self._door = door
        self._method = method
        self._handler = handler
        self._who = ""

    async def answer(self, requests: AsyncIterator[Any], context: Any) -> Any:
        """Serve a method with one response."""
        async with _ending(requests) as messages:
            async with self._refusing(context):
                caller, request = await self._enter(messages, context)
            inner: Any = self._inner()
            with noting(self._door.audit, caller, context):
                return await inner(request, context)

    async def stream(self, requests: AsyncIterator[Any], context: Any) -> None:
        """Serve a method with a stream of responses."""
        async with _ending(requests) as messages:
            async with self._refusing(context):
                caller, request = await self._enter(messages, context)
            inner: Any = self._inner()
            with noting(self._door.audit, caller, context):
                responses = inner(request, context)
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
        caller = self._admit(context)
        CALLER.set(caller)
        if self._handler is None or self._handler.request_streaming:
            return caller, _Opening(requests, self._look)
        return caller, await self._one(requests)

    def _admit(self, context: Any) -> Caller:
        principal = self._door.gate.identify(context)
        self._who = principal.name
        rule = rule_for(principal, self._method, self._door.model)
        if self._handler is None:
            raise WeightSyncError(Reason.NOT_SUPPORTED, "this server does not serve that method")
        self._caller = Caller(principal, self._method, rule, context.peer(), self._door.gate.role)
        return self._caller

    async def _one(self, requests: AsyncIterator[Any]) -> Any:
        try:
            async with asyncio.timeout(_REQUEST_S):
                data = await anext(aiter(requests), None)
        except TimeoutError:
            raise WeightSyncError(
                Reason.DEADLINE_EXCEEDED,
                f"no request came within {_REQUEST_S:g} s of the call's begin; call again",
            ) from None
        if data is None:
            raise WeightSyncError(Reason.REQUEST_INVALID, "the call holds no request; send one")
        parse: Any = self._handler and self._handler.request_deserializer
        request = reader(parse)(data) if parse else data
        self._look(request)
        return request

    def _look(self, message: Any) -> None:
        """Refuse what a request asks beyond the caller's authority."""
        # The first message of a push names the model in `begin`.
        request = self._caller.request = getattr(message, "begin", message)
        principal, rule = self._caller.principal, self._caller.rule
        model = getattr(request, "model", "")
        if model and not principal.covers(model):
            raise _denied(f"{principal.name} has no authority over the model that it names")
        for one in rule.reserved:
            if not one.allows(request, principal.roles):
                needed = " or ".join(sorted({one.role, Role.ADMIN}))
                raise _denied(f"{principal.name} may not set {one.field}; it takes role {needed}")

    @contextlib.asynccontextmanager
    async def _refusing(self, context: Any) -> AsyncIterator[None]:
        try:
            yield
        except WeightSyncError as error:
            # The path is text from outside: cut.
            method = self._method.rpartition("/")[2][:64]
            self._door.audit.refuse(error, RejectedCall(self._who, method, context.peer()))
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


class _Opening:
    """The requests of a stream; the first is looked at before the handler has it."""

    def __init__(self, requests: AsyncIterator[Any], look: Callable[[Any], None]) -> None:
        self._next = requests.__aiter__().__anext__
        self._look: Callable[[Any], None] | None = look

    def __aiter__(self) -> _Opening:
        return self

    async def __anext__(self) -> Any:
        message = await self._next()
        if self._look is not None:
            self._look(message)
            self._look = None
        return message


@contextlib.contextmanager
def noting(audit: Auditor, caller: Caller, context: Any) -> Iterator[None]:
    """Have the end of a call written down, if its work has begun.

    Args:
        audit: Who writes.
        caller: Who called what.
        context: Of the call; knows its status.
    """
    outcome = "UNAVAILABLE"
    try:
        yield
        outcome = "OK"
    except asyncio.CancelledError:
        outcome = "CANCELLED"
        raise
    except grpc.aio.AbortError:
        outcome = _name(context.code())
        raise
    finally:
        if caller.worked:
            audit.write(caller, outcome)


def _denied(sentence: str) -> WeightSyncError:
    return WeightSyncError(Reason.PERMISSION_DENIED, sentence)


def _name(code: Any) -> str:
    # gRPC gives the status back as it was set: a member of its enum, or that member's number.
    if isinstance(code, grpc.StatusCode):
        return code.name
    names = {status.value[0]: status.name for status in grpc.StatusCode}
    return names.get(code, "UNKNOWN")
