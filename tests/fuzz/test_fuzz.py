"""The corpus, and a few hostile streams; `make fuzz` goes on from here."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings

from tests.fuzz.limits import Limits
from tests.fuzz.oracles import check_file, check_part
from tests.fuzz.seeds import CORPUS, files, parts
from tests.fuzz.stream import Hostile, conversations, play

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(("target", "attempt"), [("header", check_file), ("layout", check_part)])
def test_the_corpus_passes(target: str, attempt: Callable[[bytes], bool], tmp_path: Path) -> None:
    limits = Limits(attempt, tmp_path / "figures")
    inputs = sorted((CORPUS / target).iterdir())
    assert len(inputs) >= len(files() if target == "header" else parts())
    for path in inputs:
        limits(path.read_bytes())
    # Both ways through the parser are in it.
    assert 0 < limits.figures.accepted < limits.figures.inputs


@settings(max_examples=60, deadline=None)
@given(conversations)
def test_hostile_streams_leave_whole_versions_and_nothing_else(callers: list[Hostile]) -> None:
    asyncio.run(play(callers))
