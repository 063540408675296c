"""A real vLLM of two ranks, one of which fails, lies or dies: both hold one whole version, or none.

The battery has every fault at every failpoint; these are the ones that differ with several ranks,
in each way to switch.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from tests.support.faulty_site import FaultySite, running_site
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("whole"),
]

_BETWEEN = pytest.mark.parametrize(
    "mode", [pb.PAUSE_MODE_KEEP, pb.PAUSE_MODE_BETWEEN_STEPS], ids=["keep", "between_steps"]
)


@pytest.fixture(scope="module")
def site() -> Iterator[FaultySite]:
    with running_site(2, rank="0/0/1", slower=3) as site:
        yield site


@contextlib.contextmanager
def _one_rank(site: FaultySite, plan: str) -> Iterator[None]:
    """Let one of the two ranks fail, and be sure that it was one."""
    site.arm(plan)
    yield
    assert len(site.met()) == 1, site.met()


def _refused(site: FaultySite, plan: str, mode: int) -> tuple[str, str, WeightSyncError]:
    """Apply while one rank fails; return the content before, the one asked for, the refusal."""
    site.pause.mode = pb.PauseMode.ValueType(mode)
    old = site.ask()
    version = site.push()
    with site.watched(), _one_rank(site, plan):
        refusal = site.try_apply(version)
        site.recover()
    assert refusal is not None
    assert set(site.served) <= {old, site.content[version], "503", "500", "away"}
    return old, site.content[version], refusal


@_BETWEEN
def test_two_ranks_switch_and_go_back_as_one(site: FaultySite, mode: int) -> None:
    site.pause.mode = pb.PauseMode.ValueType(mode)
    old = site.ask()
    version = site.push()
    with site.watched():
        report = site.apply(version)
        assert len(report.ranks) == 2
        assert len({rank.content_digest for rank in report.ranks}) == 1
        assert site.ask() == site.content[version] != old
        request = pb.RollbackRequest(model="default", pause=site.pause)
        site.server.stub.Rollback(request, timeout=60)
        assert site.ask() == old
    assert report.pause.mode == mode
    assert set(site.served) <= {old, site.content[version]}


@_BETWEEN
def test_one_rank_that_fails_takes_both_back(site: FaultySite, mode: int) -> None:
    old, _, refusal = _refused(site, "worker.half=1*error(ENOMEM)", mode)
    assert refusal.reason is Reason.APPLY_RESTORED
    assert "Cannot allocate memory" in refusal.message
    assert site.ask() == old
    assert not {"503", "500", "away"} & set(site.served)


def test_one_rank_that_lies_takes_both_back(site: FaultySite) -> None:
    old, _, refusal = _refused(site, "worker.reply=1*lie(content_digest)", pb.PAUSE_MODE_KEEP)
    assert refusal.reason is Reason.APPLY_RESTORED
    assert "proved falsified" in refusal.message
    assert site.ask() == old


def test_one_rank_that_lies_between_two_steps_is_fenced_and_asked(site: FaultySite) -> None:
    _, new, refusal = _refused(
        site, "worker.reply=1*lie(content_digest)", pb.PAUSE_MODE_BETWEEN_STEPS
    )
    assert refusal.reason is Reason.ENGINE_FENCED
    # Both had agreed before that answer: they hold it.
    assert site.ask() == new


def test_one_rank_that_says_no_keeps_both_where_they_were(site: FaultySite) -> None:
    # Each is asked first whether it can begin, then whether all is written.
    old, _, refusal = _refused(site, "worker.opinion=1>1*lie(no)", pb.PAUSE_MODE_BETWEEN_STEPS)
    assert refusal.reason is Reason.APPLY_RESTORED
    assert site.ask() == old
    assert "503" not in site.served


@pytest.mark.battery
def test_one_rank_that_dies_takes_the_engine_with_it(site: FaultySite) -> None:
    # vLLM is started again, and gets what was live before it serves.
    old, _, refusal = _refused(site, "worker.half=1*panic", pb.PAUSE_MODE_BETWEEN_STEPS)
    assert refusal.reason is Reason.ENGINE_FENCED
    assert site.ask() == old
