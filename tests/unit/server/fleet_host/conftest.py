"""A host of one engine, and of two."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.server.engine.plant import Engine

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(params=[1, 2])
def engines(tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, Engine]:
    return {f"e{number}": Engine(tmp_path / "segments.sock") for number in range(request.param)}
