"""Who makes a call, and what it asks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.auth.principals import EVERYBODY
from weightsync_server.auth.roles import Role

if TYPE_CHECKING:
    from weightsync_server.auth.principals import Principal
    from weightsync_server.auth.roles import Rule


class RejectedCall(NamedTuple):
    """A call that was refused at the door; what is not known is empty.

    `who` is the principal, `method` the last part of the path.
    """

    who: str = ""
    method: str = ""
    peer: str = ""


@dataclass(slots=True)
class Caller:
    """One admitted call.

    Attributes:
        method: Exact path of the method.
        listener_role: Role of the socket on which the call came in, or None.
        deadline: By `clock.monotonic`; None: it has no deadline.
        worked: Whether a method that changes state has begun; limits may refuse a call before.
        request: What was asked, or the first message of a stream; None: nothing came.
        response: What a method that changes state has answered, or the last of a stream.
        refusal: What the log says of the error that such a method ended with.
    """

    principal: Principal
    method: str
    rule: Rule
    peer: str
    listener_role: Role | None = None
    deadline: float | None = None
    worked: bool = False
    request: Any = None
    response: Any = None
    refusal: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The principal, or the host where nothing was asked; shares and rates count by it."""
        return name_of(self.principal, self.peer)

    def left_s(self) -> float | None:
        return None if self.deadline is None else max(0.0, self.deadline - clock.monotonic())

    def ask(self, message: Any) -> None:
        """Note a request, or the first message of a stream; refuse what it may not ask."""
        # The first message of a push names the model in `begin`.
        request = self.request = getattr(message, "begin", message)
        model = getattr(request, "model", "")
        if model and not self.principal.covers(model):
            raise denied(f"{self.principal.name} has no authority over the model that it names")
        for one in self.rule.reserved:
            if not one.allows(request, self.principal.roles):
                needed = " or ".join(sorted({one.role, Role.ADMIN}))
                raise denied(
                    f"{self.principal.name} may not set {one.field}; it takes role {needed}"
                )


#: What serves a method: it gets the caller and the request, or the stream of requests. It returns
#: the response, to be awaited, or is an async generator of them.
UseCase = Callable[[Caller, Any], Any]


class AskedRequests:
    """The requests of a stream; the first is what its caller asks, and nobody has it before."""

    def __init__(self, requests: AsyncIterator[Any], caller: Caller) -> None:
        self._next = requests.__aiter__().__anext__
        self._ask: Callable[[Any], None] | None = caller.ask

    def __aiter__(self) -> AskedRequests:
        return self

    async def __anext__(self) -> Any:
        message = await self._next()
        if self._ask is not None:
            self._ask(message)
            self._ask = None
        return message


def name_of(principal: Principal, peer: str) -> str:
    """Return the name that shares and rates count by: see `Caller.name`."""
    return host_of(peer) if principal is EVERYBODY else principal.name


def host_of(peer: str) -> str:
    """Return the host of an address, or its unix socket: all that is known without authority."""
    return peer if peer.startswith("unix:") else peer.rpartition(":")[0]


def for_people(name: str) -> str:
    """Return what people call the caller of a name: on a unix socket it has none of its own."""
    return name if name != "unix:" else "unix socket"


def denied(sentence: str) -> WeightSyncError:
    return WeightSyncError(Reason.PERMISSION_DENIED, sentence)
