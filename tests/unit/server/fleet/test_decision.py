"""A decision on each kind of register: the first is the only one, and no time-out makes one."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.coordination.folder_keys import FolderKeys
from weightsync_server.decide import Verdict
from weightsync_server.fleet import fleet_records
from weightsync_server.fleet.fleet_records import decide, decision_key, decode_verdict

if TYPE_CHECKING:
    from pathlib import Path

    from weightsync_server.coordination.coordination import Creation

COMMIT, ABORT = Verdict.COMMIT, Verdict.ABORT


class Unsure(FolderKeys):
    """Loses replies: of creates that were done, and of those that were not.

    Args:
        folder: Of the register.
        plan: One letter a call: `d` done and lost, `n` neither done nor answered, `+` answered.
    """

    def __init__(self, folder: Path, plan: str) -> None:
        super().__init__(folder)
        self._plan = list(plan)

    async def create(self, key: str, value: bytes) -> Creation:
        what = self._plan.pop(0) if self._plan else "+"
        found = await super().create(key, value) if what in "d+" else None
        if what == "+" and found is not None:
            return found
        raise WeightSyncError(Reason.DEADLINE_EXCEEDED, "nobody knows; call again")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_records, "_PAUSE_S", 0.001)


async def test_the_first_of_16_decides_and_all_agree(tmp_path: Path) -> None:
    for number in range(1, 21):
        racers = [FolderKeys(tmp_path) for _ in range(16)]
        verdicts = [random.choice([COMMIT, ABORT]) for _ in racers]
        found = await asyncio.gather(
            *(
                decide(one, number, 1, verdict, f"m{at}")
                for at, (one, verdict) in enumerate(zip(racers, verdicts, strict=True))
            )
        )
        assert len(set(found)) == 1
        value = await racers[0].get(decision_key(number, 1))
        assert value is not None
        assert decode_verdict(value)[0] == found[0]


@pytest.mark.parametrize("lost", ["d", "n", "nd", "dn", "nnnd", "nnn"])
@pytest.mark.parametrize("mine", Verdict)
async def test_a_lost_reply_decides_nothing(tmp_path: Path, lost: str, mine: Verdict) -> None:
    other = ABORT if mine is COMMIT else COMMIT
    unsure = Unsure(tmp_path, lost)
    assert await decide(unsure, 1, 1, mine, "m1") is mine
    assert await decide(Unsure(tmp_path, lost), 1, 1, other, "m2") is mine


@pytest.mark.parametrize("mine", Verdict)
async def test_what_another_decided_is_obeyed_after_a_time_out(
    tmp_path: Path, mine: Verdict
) -> None:
    other = ABORT if mine is COMMIT else COMMIT
    assert await decide(FolderKeys(tmp_path), 1, 1, other, "m2") is other
    assert await decide(Unsure(tmp_path, "nn"), 1, 1, mine, "m1") is other


async def test_one_who_may_not_decide_is_told(tmp_path: Path) -> None:
    class Forbidden(FolderKeys):
        async def create(self, key: str, value: bytes) -> Creation:
            raise WeightSyncError(Reason.PERMISSION_DENIED, "no")

    with pytest.raises(WeightSyncError) as caught:
        await decide(Forbidden(tmp_path), 1, 1, COMMIT, "m1")
    assert caught.value.reason == Reason.PERMISSION_DENIED
