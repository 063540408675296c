"""Folders that are posted, where that can never be served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.auth.admission import Admission
from weightsync_server.auth.audit import Audit
from weightsync_server.auth.roles import Endpoint
from weightsync_server.extensions.vllm_verbs.weight_update import WeightUpdates
from weightsync_server.http.http_calls import HttpCalls
from weightsync_server.http.http_server import HttpRequest
from weightsync_server.ops.metrics import Metrics


async def test_a_member_of_a_fleet_pushes_nothing(tmp_path: Path) -> None:
    asked: list[Any] = []

    async def ask(*call: Any) -> None:
        asked.append(call)

    audit = Audit("default", Metrics("default"))
    admission = Admission(Endpoint("127.0.0.1:1"), None, "default", audit)
    calls = HttpCalls({"/any": ask}, admission, "f")
    updates = WeightUpdates(calls, "default", [tmp_path])
    with pytest.raises(WeightSyncError) as caught:
        await updates.run(str(tmp_path), None, HttpRequest("POST", "/update_weights"))
    assert caught.value.reason is Reason.NOT_SUPPORTED
    assert caught.value.message.startswith("use `weightsync fleet apply`")
    assert not asked
