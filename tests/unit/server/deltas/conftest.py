from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.server.world import World, world

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as made:
        yield made
