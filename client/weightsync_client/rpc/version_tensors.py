"""The tensors of a version as the server tells them, page by page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.errors import Reason
from weightsync.model.digest import content_digest
from weightsync_client.errors import refuse
from weightsync_client.rpc import calls

if TYPE_CHECKING:
    from weightsync_client.options import Timeouts
    from weightsync_client.rpc.retry import Invoke
    from weightsync_client.types import TensorInfo, Version

__all__ = ["version_tensors"]

_PAGE_TENSORS = 5000


def version_tensors(
    invoke: Invoke, timeouts: Timeouts, model: str, number: int
) -> tuple[Version, list[TensorInfo]]:
    """Return a version and all of its tensors, which are proved to have its content digest.

    Args:
        invoke: Sends unary calls.
        timeouts: Of the client.
        model: Name of the model.
        number: Of the version; 0: the live one.

    Raises:
        ClientError: VERSION_UNKNOWN; DATA_CORRUPT where the tensors are not those of the version.
    """
    infos: list[TensorInfo] = []
    token, more = "", True
    while more:
        version, tensors, token = invoke(
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
            f"version {version.version}: the tensors that the server tells do not have its digest",
        )
    return version, infos
