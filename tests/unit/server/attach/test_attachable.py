"""Engines whose memory nobody gets, each with what stands in the way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weightsync.engine import ATTACH
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.attach.attachments import check_attachable
from weightsync_server.engine.worker_reports import NoPlan


def _session(
    ranks: tuple[str, ...] = ("0/0/0", "0/0/1"),
    capabilities: frozenset[str] = frozenset({ATTACH}),
    why: str = "",
) -> Any:
    info = SimpleNamespace(ranks=ranks, capabilities=capabilities)
    loads = SimpleNamespace(no_plan=NoPlan(why, "serve the model on a GPU")) if why else None
    return SimpleNamespace(info=info, loads=loads)


def test_ranks_of_one_replica_hand_out_their_memory() -> None:
    check_attachable(_session())
    check_attachable(_session(("0/0/0", "0/1/0")))


@pytest.mark.parametrize(
    ("session", "said"),
    [
        (_session(("0/0/0", "1/0/0")), "start vLLM without --data-parallel-size"),
        (
            _session(capabilities=frozenset()),
            "install the same weightsync release in vLLM and here",
        ),
        (_session(why="vLLM computes w"), r"push versions of this model .*\(vLLM computes w\)"),
    ],
)
def test_others_are_refused_in_words(session: Any, said: str) -> None:
    with pytest.raises(WeightSyncError, match=said) as caught:
        check_attachable(session)
    assert caught.value.reason is Reason.ENGINE_REFUSED
