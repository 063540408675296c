"""How a call was refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import pytest

from weightsync.wire.rpc_status import from_call

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync.errors import Reason

__all__ = ["refusal"]


def refusal(call: Callable[[], object]) -> tuple[grpc.StatusCode, Reason]:
    """Return how a call was refused."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    told = from_call(caught.value)
    assert told is not None, caught.value
    return caught.value.code(), told.reason
