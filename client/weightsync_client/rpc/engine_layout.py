"""What the engines hold, as the server tells it, page by page."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from weightsync.errors import Reason
from weightsync.model.layout import MAX_TENSORS
from weightsync_client.errors import refuse
from weightsync_client.rpc import calls

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from weightsync.v1 import weightsync_pb2 as pb
    from weightsync_client.options import Timeouts

    Ask = Callable[[calls.Call[pb.GetEngineLayoutResponse]], pb.GetEngineLayoutResponse]

__all__ = ["EngineLayout", "EngineTensor", "engine_layout"]

#: How often it may become another one while it is read.
_CHANGES = 4


class EngineTensor(NamedTuple):
    """What a tensor is.

    Attributes:
        dtype: safetensors dtype name.
        shape: Dimensions in elements.
    """

    dtype: str
    shape: tuple[int, ...]


class EngineLayout(NamedTuple):
    """What an engine holds.

    Attributes:
        signature: Names it.
        kinds: Its tensors, by name.
    """

    signature: str
    kinds: Mapping[str, EngineTensor]


def engine_layout(
    ask: Ask, timeouts: Timeouts, model: str, known: EngineLayout | None
) -> EngineLayout | None:
    """Return what the engines hold; None: nobody knows by now.

    Args:
        ask: Sends a call.
        timeouts: Of the client.
        model: Name of the model.
        known: What they had when they were last asked; it is returned if they still do.

    Raises:
        ClientError: Of the call; DATA_CORRUPT: the server tells more tensors than there may be.
    """
    signature, token, changes = "", "", 0
    kinds: dict[str, EngineTensor] = {}
    # Of hundreds of thousands of tensors most are alike.
    alike: dict[EngineTensor, EngineTensor] = {}
    while True:
        asked = known.signature if known is not None else ""
        reply = ask(calls.get_engine_layout(model, asked, token, timeouts))
        if not reply.signature:
            return None
        if known is not None and reply.signature == known.signature:
            return known
        if reply.signature != signature:
            changes += bool(signature)
            signature, kinds = reply.signature, {}
        twice = False
        for tensor in reply.tensors:
            twice |= tensor.name in kinds
            kind = EngineTensor(tensor.dtype, tuple(tensor.shape))
            kinds[tensor.name] = alike.setdefault(kind, kind)
        token = reply.next_page_token
        if twice:
            # Older servers' pages have an order that may change under one signature: another
            # tensor has not come.
            signature, token, changes = "", "", changes + 1
        elif not token:
            return EngineLayout(signature, kinds)
        if len(kinds) > MAX_TENSORS or changes > _CHANGES or not reply.tensors:
            raise refuse(
                Reason.DATA_CORRUPT,
                "check `weightsync status`, then push again: the server's list of engine tensors "
                f"kept changing ({len(kinds)} tensors, {changes} changes)",
            )
