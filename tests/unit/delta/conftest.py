"""Every test of the codec runs with each kernels that this machine has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from weightsync.delta import kernels

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module", params=["plain", "generic", "avx2", "avx512"], autouse=True)
def used_kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    name: str = request.param
    if name not in kernels.available():
        pytest.skip(f"this machine has no {name} kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(kernels.VARIABLE, name)
        kernels.chosen.cache_clear()
        yield name
    kernels.chosen.cache_clear()
