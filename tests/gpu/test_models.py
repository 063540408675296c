"""Every kind of model on a CUDA vLLM with CUDA graphs: an update equals a fresh engine.

docs/reference/models.md has a row for each kind. Needs a GPU, and a vLLM built for it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.gpu.kinds import KINDS
from benchmarks.gpu.loading import transform
from tests.support.kind_site import Fresh, KindSite
from weightsync.errors import Reason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightsync.v1 import weightsync_pb2 as pb

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]

#: What the driver may keep for itself, and what Python and vLLM's caches of the host may.
_DEVICE_GROWTH, _HOST_GROWTH = 64 << 20, 256 << 20
#: Applies that may still take memory for good, and those that may not.
_FIRST, _APPLIES = 5, 20


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in KINDS],
)
def started(request: pytest.FixtureRequest) -> Iterator[tuple[KindSite, Fresh]]:
    """Start a site of the kind."""
    root = Path(tempfile.mkdtemp(prefix="wk-"))
    site = KindSite(KINDS[request.param], root)
    try:
        yield site, site.start()
    finally:
        site.stop()
        shutil.rmtree(root)


@pytest.fixture
def site(started: tuple[KindSite, Fresh]) -> KindSite:
    return started[0]


@pytest.fixture
def fresh(started: tuple[KindSite, Fresh]) -> Fresh:
    return started[1]


def test_an_update_and_its_rollback_answer_like_fresh_engines(site: KindSite, fresh: Fresh) -> None:
    before, first = site.answers(), site.digests()
    assert before != fresh.answers
    version = site.push("b")
    report = site.apply(version)
    _tell(site, report)
    assert site.answers() == fresh.answers
    assert _unlike(site.digests(), fresh.digests) == []
    assert site.verified()
    site.rollback()
    assert site.answers() == before
    assert _unlike(site.digests(), first) == []
    assert site.verified()


def _tell(site: KindSite, report: pb.ApplyReport) -> None:
    """Print how it went, which pytest's -rA shows."""
    found = {
        "kind": site.kind.name,
        "transform": transform(site.client),
        "pause_total_s": report.phases.paused_total.ToTimedelta().total_seconds(),
        "written_bytes": report.written_bytes,
    }
    print(json.dumps(found))  # noqa: T201 - worth reading


def _unlike(found: dict[str, str], wanted: dict[str, str]) -> list[str]:
    names = sorted(found.keys() | wanted.keys())
    return [name for name in names if found.get(name) != wanted.get(name)]


def test_a_failing_rank_is_restored(site: KindSite) -> None:
    before, digests = site.answers(), site.digests()
    refusal = site.refused(site.push("b"), "worker.written=1*error(ENOMEM)")
    assert refusal.reason is Reason.APPLY_RESTORED, refusal.message
    assert site.answers() == before
    assert _unlike(site.digests(), digests) == []
    assert site.verified()


def test_twenty_applies_in_a_row_take_no_more_memory(site: KindSite, fresh: Fresh) -> None:
    device, host = 0, 0
    for number in range(1, _APPLIES + 1):
        site.apply(site.push("ab"[number % 2]))
        if number == _FIRST:
            device, host = site.memory()
    now_device, now_host = site.memory()
    site.apply(site.push("b"))
    assert site.answers() == fresh.answers
    assert now_device - device <= _DEVICE_GROWTH
    assert now_host - host <= _HOST_GROWTH
