from __future__ import annotations

from typing import Any

import pytest

from weightsync.errors import Reason, WeightSyncError
from weightsync.wire.json_struct import from_struct, to_struct


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
        ({"a": object()}, "it is no JSON object that can be sent"),
        ({"a": float("inf")}, "it is no JSON object that can be sent"),
        ({"a": "\ud800"}, "it is no JSON object that can be sent"),
        ({"a": 10**400}, "it is no JSON object that can be sent"),
        ({(1, 2): 1}, "it is no JSON object that can be sent"),
        ({"a": 2**53 + 1}, r"it has a whole number above 2\^53"),
    ],
)
def test_what_would_come_out_otherwise(value: Any, wrong: str) -> None:
    with pytest.raises(WeightSyncError, match=wrong) as caught:
        to_struct("it", value)
    assert caught.value.reason is Reason.REQUEST_INVALID


def test_what_is_nested_too_deep() -> None:
    deep: dict[str, Any] = {}
    for _ in range(60):
        deep = {"a": deep}
    with pytest.raises(WeightSyncError, match="no JSON object that can be sent"):
        to_struct("it", deep)
