"""Tensors as the server tells them, page by page: those that the engines hold, or a version has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from weightsync.errors import Reason
from weightsync.model.digest import content_digest
from weightsync.model.layout import MAX_TENSORS
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client.errors import refuse
from weightsync_client.rpc import calls

if TYPE_CHECKING:
    from weightsync_client.options import Timeouts
    from weightsync_client.types import TensorInfo, Version

    Ask = Callable[[calls.Call[pb.GetEngineLayoutResponse]], pb.GetEngineLayoutResponse]
    _Page = tuple[Version, list[TensorInfo], str]
    AskVersion = Callable[[calls.Call[_Page]], _Page]

#: How often it may become another one while it is read.
_CHANGES = 4


class EngineTensor(NamedTuple):
    """The safetensors dtype of a tensor, and its shape in elements."""

    dtype: str
    shape: tuple[int, ...]


class EngineLayout(NamedTuple):
    """What an engine holds: its tensors by name, and a `signature` that names the layout."""

    signature: str
    kinds: Mapping[str, EngineTensor]


def engine_layout(
    ask: Ask, timeouts: Timeouts, model: str, known: EngineLayout | None
) -> EngineLayout | None:
    """Return what the engines hold, or None if nobody knows by now.

    `known` is the last answer; it is returned if it still holds.
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
                "check `weightsync status`, then push again: the server's list of the engine's "
                f"tensors kept changing ({len(kinds)} tensors, {changes} changes)",
            )


_PAGE_TENSORS = 5000


def version_tensors(
    ask: AskVersion, timeouts: Timeouts, model: str, number: int
) -> tuple[Version, list[TensorInfo]]:
    """Return a version (0: live) and all its tensors; raises DATA_CORRUPT if its digest differs."""
    infos: list[TensorInfo] = []
    token, more = "", True
    while more:
        version, tensors, token = ask(
            calls.get_version(model, number, timeouts, tensors=_PAGE_TENSORS, page_token=token)
        )
        # 0 means the live one, which may change between two pages.
        number = version.version
        infos += tensors
        more = bool(token)
    digest = content_digest((t.name, t.dtype, t.shape, bytes.fromhex(t.digest)) for t in infos)
    if digest != version.content_digest or any(t.shard >= version.shard_count for t in infos):
        raise refuse(
            Reason.DATA_CORRUPT,
            f"version {version.version}: the tensors that the server listed do not match its "
            "digest",
        )
    return version, infos
