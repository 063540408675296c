"""One lease at a time, by a clock that nobody moves."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.clocks import Clocks
from weightsync.engine import OnExpiry, OpenApply, PauseSpec
from weightsync.engine.leases import PauseLease
from weightsync.errors import Reason, WeightSyncError

APPLY = OpenApply("a1", 3, 4)
FENCING = PauseSpec(on_expiry=OnExpiry.FENCE, apply=APPLY)


def _refused(lease: PauseLease, lease_id: str) -> bool:
    try:
        lease.check(lease_id)
    except WeightSyncError as error:
        return error.reason is Reason.ENGINE_REFUSED
    return False


def _open(lease: PauseLease) -> OpenApply | None:
    return lease.open_apply


async def test_the_wall_clock_moves_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks.over(monkeypatch)
    ended: list[str] = []
    lease = PauseLease(ended.append)
    present = lease.take(60, PauseSpec())
    for jump in (-3600, 86_400):
        clocks.wall += jump
        assert not _refused(lease, present)
    clocks.monotonic += 59
    lease.renew(present, 60)
    clocks.monotonic += 59
    assert not _refused(lease, present)
    lease.drop()
    assert _refused(lease, present)
    assert _refused(lease, "")
    await asyncio.sleep(0)
    assert ended == []


async def test_a_lease_runs_out_while_its_host_is_suspended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocks = Clocks.over(monkeypatch)
    lease = PauseLease(lambda _: None)
    present = lease.take(60, FENCING)
    clocks.suspended += 60
    assert _refused(lease, present)
    lease.drop()


async def test_a_lease_that_ran_out_is_not_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks.over(monkeypatch)
    lease = PauseLease(lambda _: None)
    present = lease.take(60, FENCING)
    clocks.monotonic += 60
    # The timer of the loop has not fired: the message is read first.
    with pytest.raises(WeightSyncError, match="not the current lease"):
        lease.renew(present, 60)
    assert _refused(lease, present)
    lease.drop()


async def test_the_lease_of_another_engine_prolongs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocks = Clocks.over(monkeypatch)
    one, other = PauseLease(lambda _: None), PauseLease(lambda _: None)
    mine, theirs = one.take(60, FENCING), other.take(60, FENCING)
    clocks.monotonic += 40
    # Both are paused for one apply, and each lives by its own server's word.
    with pytest.raises(WeightSyncError, match="not the current lease"):
        one.renew(theirs, 60)
    other.renew(theirs, 60)
    clocks.monotonic += 40
    assert _refused(one, mine)
    assert not _refused(other, theirs)
    one.drop()
    other.drop()


async def test_an_apply_is_open_until_generation_starts() -> None:
    lease = PauseLease(lambda _: None)
    lease.take(60, FENCING)
    assert _open(lease) == APPLY
    lease.drop()
    assert _open(lease) == APPLY
    assert "apply a1 (3 to 4) timed out" in lease.undecided()
    # One of this server alone decides nothing of what others take part in.
    lease.take(60, PauseSpec())
    assert lease.on_expiry is OnExpiry.RESUME
    assert _open(lease) == APPLY
    lease.settle()
    assert _open(lease) is None
    assert not lease.id


async def test_the_timer_of_a_lease_that_was_dropped_does_not_end_the_next() -> None:
    ended: list[str] = []
    lease = PauseLease(ended.append)
    lease.take(0.02, FENCING)
    lease.drop()
    second = lease.take(60, FENCING)
    await asyncio.sleep(0.05)
    assert ended == []
    assert not _refused(lease, second)
    lease.drop()
