"""Ranks that have digested what a trainer wrote, and whether they agree."""

from __future__ import annotations

from typing import Any

import pytest

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.attach.in_place import check_agreed
from weightsync_server.engine.worker_reports import RankCommit, read_commit

_NAME = "in place 1"


def _rank(rank: str, **reply: Any) -> RankCommit:
    reply = {"ok": True, "apply_id": "base", "content_digest": _NAME, **reply}
    return read_commit(rank, "base", reply)


def _refusal(*ranks: RankCommit) -> str:
    with pytest.raises(WeightSyncError) as caught:
        check_agreed(ranks, _NAME)
    assert caught.value.reason is Reason.DATA_CORRUPT
    return caught.value.message


def test_ranks_that_hold_the_same_of_what_both_have_agree() -> None:
    first = _rank("0/0/0", parts={"w 0": "aa", "b 0": "cc"})
    second = _rank("0/0/1", parts={"w 8": "bb", "b 0": "cc"})
    check_agreed([first, second], _NAME)
    check_agreed([first], _NAME)


def test_other_bytes_of_the_same_part_are_named() -> None:
    ranks = [_rank(f"0/0/{n}", parts={"w 0": "aa", f"b {n // 2}": str(n)}) for n in range(4)]
    message = _refusal(*ranks)
    assert "ranks 0/0/0 and 0/0/1 hold different bytes of the same part of b" in message


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ({"ok": False, "error": "out of memory"}, "out of memory"),
        ({"apply_id": "other"}, "answered for apply 'other'"),
        ({"content_digest": ""}, "no answer"),
        ({"content_digest": "in place 2"}, "no answer"),
    ],
)
def test_a_rank_that_did_not_do_it_is_named(reply: dict[str, Any], why: str) -> None:
    message = _refusal(_rank("0/0/0"), _rank("0/0/1", **reply))
    assert message == f"rank 0/0/1 did not digest what was written ({why})"
