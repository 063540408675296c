"""Who can still write an engine's memory, by the word of every rank: silence is no word."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.engine.plant import Engine, plant, until
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.engine import block_writers
from weightsync_server.engine.block_writers import still_writing, wait_let_go
from weightsync_server.engine.worker_reports import read_state

if TYPE_CHECKING:
    from pathlib import Path

_NOBODY = {"ok": True, "content_digest": "d", "dirty": False, "holders": []}
_SILENT = {"ok": False, "error": "out of memory"}


def _states(*replies: dict[str, Any]) -> Any:
    return [read_state(f"0/0/{number}", reply) for number, reply in enumerate(replies)]


def test_a_rank_that_does_not_answer_may_be_written() -> None:
    assert still_writing(_states(_NOBODY, _NOBODY)) == ""
    said = still_writing(_states(_NOBODY, _SILENT, _SILENT))
    assert "rank 0/0/1, 0/0/2 does not report who can write its memory" in said
    writing = _NOBODY | {"writing": True, "writers": [7], "holders": [7]}
    assert still_writing(_states(_SILENT, writing)).startswith("end process 7")


def test_a_process_that_has_no_pid_here_is_not_named_by_it() -> None:
    writing = _NOBODY | {"writing": True, "holders": [0]}
    assert still_writing(_states(writing)).startswith("end the trainer, or")
    writing["holders"] = [0, 7]
    assert still_writing(_states(writing)).startswith("end process 7, or")


async def test_a_rank_is_asked_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_writers, "_LOOK_S", 0.001)
    answers = [_states(_SILENT), _states(_SILENT), _states(_NOBODY)]

    async def states() -> Any:
        return answers.pop(0)

    session: Any = SimpleNamespace(states=states)
    assert await wait_let_go(session) == ""
    assert not answers
    monkeypatch.setattr(block_writers, "_LET_GO_S", 0.0)
    answers = [_states(_SILENT)]
    assert "rank 0/0/0 does not report" in await wait_let_go(session)


async def test_nothing_is_placed_where_a_rank_does_not_say_who_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_writers, "_LET_GO_S", 0.1)
    engine = Engine(tmp_path / "segments.sock", ranks=2)
    async with plant(tmp_path, engine) as it:
        await it.bring(2)
        engine.events.clear()
        engine.after["state"] = lambda replies: [replies[0], replies[1] | _SILENT]
        it.keeper.suspect("a test asks")
        await until(lambda: "does not report who can write" in it.keeper.status().reason)
        assert it.keeper.status().state == pb.ENGINE_STATE_FENCED
        assert set(engine.events) == {"fence"}, "nothing was written"
        engine.after.clear()
        await it.ready()
        assert engine.serves == 2
