"""The corpus, and a few hostile streams; `make fuzz` goes on from here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings

from tests.fuzz.deltas import check_delta
from tests.fuzz.limits import Limits
from tests.fuzz.messages import check_message
from tests.fuzz.oracles import check_file, check_part
from tests.fuzz.seeds import CORPUS, files, messages, parts, shards
from tests.fuzz.stream import Hostile, conversations, play

_TARGETS: dict[str, tuple[Callable[[bytes], bool], Callable[[], list[bytes]]]] = {
    "header": (check_file, files),
    "layout": (check_part, parts),
    "delta": (check_delta, shards),
    "message": (check_message, messages),
}


@pytest.mark.parametrize("target", _TARGETS)
def test_the_corpus_passes(target: str, tmp_path: Path) -> None:
    attempt, seeds = _TARGETS[target]
    limits = Limits(attempt, tmp_path / "figures")
    inputs = sorted((CORPUS / target).iterdir())
    assert len(inputs) >= len(seeds())
    for path in inputs:
        limits(path.read_bytes())
    # Both ways through the parser are in it.
    assert 0 < limits.figures.accepted < limits.figures.inputs


@settings(max_examples=60)
@given(conversations)
def test_hostile_streams_leave_whole_versions_and_nothing_else(callers: list[Hostile]) -> None:
    asyncio.run(play(callers))
