"""Refusals as documents: sockets of one host and child processes have the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weightsync.errors import Reason, WeightSyncError
from weightsync.wire.documents import refusal, refusal_of


def test_a_refusal_arrives_with_all_that_programs_read() -> None:
    error = WeightSyncError(Reason.LAYOUT_INVALID, "push again: no", metadata={"writer": "2"})
    found = refusal_of(json.loads(json.dumps(refusal(error))))
    assert (found.reason, found.message) == (error.reason, error.message)
    assert found.metadata == {"writer": "2"}


@pytest.mark.parametrize(
    ("document", "reason", "metadata"),
    [
        ({"reason": "DATA_CORRUPT"}, Reason.DATA_CORRUPT, {}),
        ({"reason": "OF_A_NEWER_RELEASE"}, Reason.NOT_SUPPORTED, {}),
        ({}, Reason.NOT_SUPPORTED, {}),
        ({"reason": "DATA_CORRUPT", "metadata": [1]}, Reason.DATA_CORRUPT, {}),
        ({"reason": "DATA_CORRUPT", "metadata": {"shard": 1}}, Reason.DATA_CORRUPT, {"shard": "1"}),
    ],
)
def test_one_of_another_release_is_read(
    document: dict[str, Any], reason: Reason, metadata: dict[str, str]
) -> None:
    found = refusal_of({"error": "no", **document})
    assert (found.reason, found.message, found.metadata) == (reason, "no", metadata)
