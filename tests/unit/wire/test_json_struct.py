from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import train_pb2 as pb
from weightsync.wire.json_struct import from_struct, to_struct

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"a": 1, "b": 1.5, "c": "x", "d": None, "e": True, "f": [1, [2.5, {}]], "g": {"h": []}},
        {"most": 2**53, "least": -(2**53), "small": 5e-324, "": "empty"},
        {"1e300": 1e300},
    ],
)
def test_what_goes_in_comes_out(value: dict[str, Any]) -> None:
    found = from_struct(to_struct("it", value))
    assert found == value
    assert type(found.get("a", 1)) is int
    assert type(found.get("b", 1.5)) is float


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ({"a": object()}, "it is not a JSON object that can be sent"),
        ({"a": float("inf")}, "it is not a JSON object that can be sent"),
        ({"a": "\ud800"}, "it is not a JSON object that can be sent"),
        ({"a": 10**400}, "it is not a JSON object that can be sent"),
        ({(1, 2): 1}, "it is not a JSON object that can be sent"),
        ({"a": 2**53 + 1}, r"it has a whole number above 2\^53, .*; send it as text"),
    ],
)
def test_what_would_come_out_otherwise(value: Any, wrong: str) -> None:
    with pytest.raises(WeightSyncError, match=wrong) as caught:
        to_struct("it", value)
    assert caught.value.reason is Reason.REQUEST_INVALID


@pytest.mark.parametrize("wrap", [lambda inner: {"a": inner}, lambda inner: [inner]])
def test_how_deep_it_may_be_nested(wrap: Callable[[Any], Any]) -> None:
    def carried(deep: Any) -> Any:
        sent = pb.TrainRequest(request=to_struct("it", {"a": deep})).SerializeToString()
        return from_struct(pb.TrainRequest.FromString(sent).request)["a"]

    nested = [1]
    for _ in range(60):
        nested.append(wrap(nested[-1]))
    assert carried(nested[29]) == nested[29]
    refusals = []
    for deep in nested[30:]:
        # Whole or refused: none that only the server cannot read.
        try:
            assert carried(deep) == deep
        except WeightSyncError as error:
            refusals.append(error.message)
    assert refusals
    assert all("nested at most 30 deep" in refusal for refusal in refusals)
