from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from tests.support.fleet_tasks import Fleet
from weightsync.errors import WeightSyncError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    made = Fleet(tmp_path)
    yield made
    with contextlib.suppress(WeightSyncError):
        await made.close()
