"""Who makes the call that this task serves."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from weightsync_server.auth.principals import Principal
    from weightsync_server.auth.roles import Role, Rule

__all__ = ["CALLER", "Caller", "RejectedCall"]


class RejectedCall(NamedTuple):
    """A call that was refused at the door; what is not known is empty.

    Attributes:
        who: Name of the principal.
        method: Last part of its path.
        peer: Address of the other end, as gRPC tells it.
    """

    who: str = ""
    method: str = ""
    peer: str = ""


@dataclass(slots=True)
class Caller:
    """One admitted call.

    Attributes:
        principal: Who calls.
        method: Exact path of the method.
        rule: The rule that admitted it.
        peer: Address of the other end, as gRPC tells it.
        door: Role that the socket stands for on which the call came in; None: it stands for none.
        worked: Whether a method that changes state has begun; limits may refuse a call before.
        request: What was asked, or the first message of a stream; None: nothing came.
        response: What a method that changes state has answered, or the last of a stream.
    """

    principal: Principal
    method: str
    rule: Rule
    peer: str
    door: Role | None = None
    worked: bool = False
    request: Any = None
    response: Any = None


#: Set before a handler runs, by the interceptor alone; None outside of calls.
CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)
