"""One vLLM and one server for all modules here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.faulty_site import FaultySite, running_site
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(
    scope="package",
    params=[
        pytest.param((1, False), id="tp1"),
        pytest.param((1, True), marks=pytest.mark.battery, id="tp1-patch"),
        pytest.param((2, False), marks=pytest.mark.battery, id="tp2"),
        pytest.param((2, True), marks=pytest.mark.battery, id="tp2-patch"),
    ],
)
def shared_site(request: pytest.FixtureRequest) -> Iterator[FaultySite]:
    """Run a site of so many ranks, whose applies are patches or write everything."""
    tp, alike = request.param
    with running_site(tp, alike=alike) as site:
        yield site


@pytest.fixture
def site(shared_site: FaultySite) -> FaultySite:
    """Return it as it was begun: applies pause it, and requests are kept."""
    shared_site.pause = pb.PauseOptions()
    return shared_site
