from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.server.engine.plant import Engine, Plant, hurry, plant

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path / "segments.sock")


@pytest.fixture
async def it(tmp_path: Path) -> AsyncIterator[Plant]:
    async with plant(tmp_path) as made:
        await made.ready()
        yield made
