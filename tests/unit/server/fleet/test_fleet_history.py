"""What a reading of the register costs, and that it says the same whatever was read before."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.support.fleet_hosts import version
from weightsync_server.coordination.folder_keys import FolderKeys
from weightsync_server.decide import ApplyOrder, DecisionPlan, Verdict, divide
from weightsync_server.fleet.fleet_history import _READ_AGAIN, HistoryReader, parse_history
from weightsync_server.fleet.fleet_records import (
    decision_key,
    encode_plan,
    encode_roster,
    encode_verdict,
    plan_key,
    roster_key,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_MEMBERS = [f"host{number:03}" for number in range(20)]


class _Counting(FolderKeys):
    """Counts what its callers are sent.

    Attributes:
        sent: Bytes of keys and values.
    """

    sent = 0

    async def list_each(self, prefixes: Sequence[str], start: str = "") -> dict[str, bytes]:
        found = await super().list_each(prefixes, start)
        self.sent += sum(len(key) + len(value) for key, value in found.items())
        return found


class _Slow(FolderKeys):
    """Answers the next call with what is there now, once it is told to.

    Attributes:
        asked: The next call has come.
        answers: It may return; None: no call is kept waiting.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.asked = asyncio.Event()
        self.answers: asyncio.Event | None = None

    async def list_each(self, prefixes: Sequence[str], start: str = "") -> dict[str, bytes]:
        found = await super().list_each(prefixes, start)
        answers, self.answers = self.answers, None
        if answers is not None:
            self.asked.set()
            await answers.wait()
        return found


async def _decided(register: FolderKeys, number: int) -> None:
    """Commit an apply of one wave."""
    waves = divide(_MEMBERS, ApplyOrder.ROLLING, len(_MEMBERS))
    plan = DecisionPlan(
        number, f"n{number}", ApplyOrder.ROLLING, version(number + 1), version(number), waves, 1
    )
    (part,) = encode_roster(plan.waves)
    await register.create(roster_key(plan.nonce, 0), part)
    await register.create(plan_key(number), encode_plan(plan, 1))
    await register.create(decision_key(number, 1), encode_verdict(Verdict.COMMIT, "a"))


async def _apply(register: FolderKeys, reader: HistoryReader, number: int) -> int:
    """Decide on a rolling apply, wave by wave; return the bytes of a member's readings."""
    counting = reader._coordination
    assert isinstance(counting, _Counting)
    waves = divide(_MEMBERS, ApplyOrder.ROLLING, 1)
    plan = DecisionPlan(
        number, f"n{number}", ApplyOrder.ROLLING, version(number + 1), version(number), waves, 21
    )
    (part,) = encode_roster(plan.waves)
    before = counting.sent
    await register.create(roster_key(plan.nonce, 0), part)
    await register.create(plan_key(number), encode_plan(plan, 1))
    for step in range(1, 22):
        await reader.read()
        await register.create(decision_key(number, step), encode_verdict(Verdict.COMMIT, "a"))
    history = await reader.read()
    assert history == await HistoryReader(register).read()
    assert history.newest is not None
    assert history.newest.outcome is Verdict.COMMIT
    return counting.sent - before


async def test_the_ninth_rolling_apply_costs_what_the_first_did(tmp_path: Path) -> None:
    register, counting = FolderKeys(tmp_path), _Counting(tmp_path)
    reader = HistoryReader(counting)
    costs = [await _apply(register, reader, number) for number in range(1, 10)]
    # A first reading of the next apply still has what ended the one before.
    assert costs[8] < 1.4 * costs[0], costs
    # All that it says is known without reading it again, and nothing else.
    assert len((await reader.read()).applies) == 9


async def test_what_was_emptied_or_removed_is_read_anew(tmp_path: Path) -> None:
    register = _Counting(tmp_path)
    reader = HistoryReader(register)
    for number in (1, 2):
        await _apply(register, reader, number)
    await register.delete([plan_key(2)])
    assert (await reader.read()).number == 1
    await register.delete(list(await register.list("")))
    assert (await reader.read()).number == 0


async def test_readings_that_overlap_where_all_is_read_anew_have_all_that_counts(
    tmp_path: Path,
) -> None:
    register = _Slow(tmp_path)
    reader = HistoryReader(register)
    for number in range(1, _READ_AGAIN):
        await _decided(register, number)
    await reader.read()
    await _decided(register, _READ_AGAIN)
    register.answers = answers = asyncio.Event()
    slow = asyncio.create_task(reader.read())
    await register.asked.wait()
    # It forgets what it had, so that the next one reads all.
    await reader.read()
    answers.set()
    whole = await HistoryReader(register).read()
    assert len(whole.applies) == _READ_AGAIN
    assert await slow == whole
    assert await reader.read() == whole


def test_a_decision_before_one_that_was_read_is_no_register_that_was_put_back() -> None:
    waves = (("a",), ("b",))
    plan = DecisionPlan(1, "n", ApplyOrder.ROLLING, version(2), version(1), waves, 3)
    keys = {
        plan_key(1): encode_plan(plan, 1),
        decision_key(1, 1): encode_verdict(Verdict.COMMIT, "x", nonce="n"),
        decision_key(1, 3): encode_verdict(Verdict.COMMIT, "x", nonce="another"),
    }
    seen = parse_history(keys, None).seen
    keys[decision_key(1, 2)] = encode_verdict(Verdict.COMMIT, "x", nonce="n")
    assert parse_history(keys, None).lacks(seen) == ""


async def test_a_part_of_a_roster_is_not_the_roster(tmp_path: Path) -> None:
    register = FolderKeys(tmp_path)
    names = [f"{'m' * 60}{at:03}" for at in range(70)]
    waves = divide(names, ApplyOrder.ROLLING, 1)
    plan = DecisionPlan(1, "n", ApplyOrder.ROLLING, version(2), version(1), waves, 71)
    parts = encode_roster(waves)
    assert len(parts) > 1
    await register.create(plan_key(1), encode_plan(plan, len(parts)))
    reader = HistoryReader(register)
    # Another apply may have followed it: its waves are not read with it.
    (apply,) = parse_history(await register.list("applies/"), None).applies
    for at, part in enumerate(parts):
        assert not (await reader.whole(apply)).plan.waves
        await register.create(roster_key("n", at), part)
    assert (await reader.whole(apply)).plan == plan
