"""What tests of faults beside a real vLLM have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.faulty_site import FaultySite


@pytest.fixture
def whole(site: FaultySite) -> Iterator[None]:
    """Whatever a test did: afterwards one verified version is served, and nothing was violated."""
    site.recover()
    yield
    site.recover()
    assert site.violations() == 0
