"""The states that docs/explain/architecture.md draws are those that the code knows."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.decide import ApplyPhase, Verdict
from weightsync_server.residency import slot_pool

_PAGE = Path(__file__).resolve().parents[2] / "docs/explain/architecture.md"


def _diagram(heading: str) -> str:
    _, _, section = _PAGE.read_text().partition(f"\n## {heading}\n")
    return section.partition("```mermaid\n")[2].partition("```")[0]


def _states(diagram: str) -> set[str]:
    edges = re.findall(r"^ *(\S+) --> (\w+|\[\*\])", diagram, re.MULTILINE)
    return {state for edge in edges for state in edge} - {"[*]"}


@pytest.mark.parametrize(
    ("block", "states", "prefix"),
    [
        ("D", pb.Durability, "DURABILITY_"),
        ("R", pb.Residency, "RESIDENCY_"),
        ("L", pb.Serving, "SERVING_"),
    ],
)
def test_the_states_of_a_version_are_those_of_the_contract(
    block: str, states: Any, prefix: str
) -> None:
    drawn = re.search(rf"as {block} {{(.*?)}}", _diagram("States of a version"), re.DOTALL)
    assert drawn is not None
    known = {name.removeprefix(prefix).lower() for name, _ in states.items()}
    assert _states(drawn[1]) == known - {"unspecified"}


def test_the_states_of_a_slot_are_those_that_status_shows() -> None:
    function = ast.parse(inspect.getsource(slot_pool._state))
    known = {node.value for node in ast.walk(function) if isinstance(node, ast.Constant)}
    assert _states(_diagram("States of a slot")) == known - {None}


def test_a_fleet_reports_the_phases_and_verdicts_that_there_are() -> None:
    diagram = _diagram("How a fleet decides")
    assert re.findall(r"report N (\w+)", diagram) == [phase.value for phase in ApplyPhase]
    assert re.findall(r"(?:alt|else) (\w+)", diagram) == [verdict.value for verdict in Verdict]
