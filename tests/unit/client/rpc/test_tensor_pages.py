"""What a client asks of the engines' tensors."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import ClientError, Reason
from weightsync_client.options import Timeouts
from weightsync_client.rpc.tensor_pages import engine_layout


def test_a_list_that_keeps_changing_is_refused_with_how_often_it_did() -> None:
    signatures = itertools.count()

    def ask(_: object) -> Any:
        tensor = pb.EngineTensor(name="w", dtype="F32", shape=(1,))
        return pb.GetEngineLayoutResponse(
            signature=f"s{next(signatures)}", tensors=[tensor], next_page_token="1"
        )

    with pytest.raises(ClientError, match=r"^check `weightsync status`") as caught:
        engine_layout(ask, Timeouts(), "m", None)
    assert caught.value.reason is Reason.DATA_CORRUPT
    assert "(1 tensors, 5 changes)" in caught.value.message


def test_pages_that_do_not_go_together_are_asked_for_again() -> None:
    # The last page is of the same tensors in another order: `b` has not come.
    pages = iter(["a", "a", "a", "b"])
    asked: list[str] = []

    def ask(call: Any) -> Any:
        asked.append(call.request.page_token)
        name = next(pages)
        token = "1" if len(asked) % 2 else ""
        tensor = pb.EngineTensor(name=name, dtype="F32", shape=(1,))
        return pb.GetEngineLayoutResponse(signature="s", tensors=[tensor], next_page_token=token)

    found = engine_layout(ask, Timeouts(), "m", None)
    assert found is not None
    assert set(found.kinds) == {"a", "b"}
    assert asked == ["", "1", "", "1"]


def test_a_tensor_that_always_comes_twice_is_refused() -> None:
    def ask(_: object) -> Any:
        tensor = pb.EngineTensor(name="w", dtype="F32", shape=(1,))
        return pb.GetEngineLayoutResponse(signature="s", tensors=[tensor], next_page_token="1")

    with pytest.raises(ClientError, match=r"^check `weightsync status`") as caught:
        engine_layout(ask, Timeouts(), "m", None)
    assert caught.value.reason is Reason.DATA_CORRUPT
