"""Every test of the codec runs twice: with numpy's kernels and with the compiled ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from weightsync.delta import kernels
from weightsync.delta.kernels import plain

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType


def _kernels(name: str) -> ModuleType:
    if name == "plain":
        return plain
    pytest.importorskip("numba", reason="compiled kernels need numba")
    from weightsync.delta.kernels import compiled

    return compiled


@pytest.fixture(scope="module", params=["plain", "compiled"], autouse=True)
def used_kernels(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    module = _kernels(request.param)
    before = kernels._choice._made
    kernels._choice._made = module
    yield module
    kernels._choice._made = before
