from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.server.push.remote import DistantPushes
from tests.unit.server.world import World, world
from weightsync_server.push import PushService

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture(params=[PushService, DistantPushes], ids=["here", "distant"])
async def here(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path, pushes_of=request.param) as made:
        yield made
