"""What many seeds of a scenario come to, and the tables of docs/explain/fleet-scale.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.fleet.constants import rows
from benchmarks.fleet.scenarios import WANTED_S, Scenario, is_wanted
from benchmarks.fleet.simulation import Seconds

__all__ = ["Line", "constants_table", "keys", "percentile", "summed_up", "table"]


@dataclass(frozen=True)
class Line:
    """Seconds from the commit until the last host is there, over all seeds.

    Attributes:
        scenario: Of the line.
        seeds: How many.
        staged_p50, staged_p99: Every host has staged.
        barrier_p50, barrier_p99: Every host is live, by one decision; infinite: never.
        pause_p99: The longest pause of an engine in that barrier.
        rolling_p50, rolling_p99: Every host is live, in waves.
        refused: Answers 503 of the store, on average.
    """

    scenario: Scenario
    seeds: int
    staged_p50: float
    staged_p99: float
    barrier_p50: float
    barrier_p99: float
    pause_p99: float
    rolling_p50: float
    rolling_p99: float
    refused: float


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that this share of all values does not exceed."""
    ordered = sorted(values)
    return ordered[max(1, math.ceil(share * len(ordered))) - 1]


def summed_up(scenario: Scenario, runs: Sequence[Seconds]) -> Line:
    """Return the line of these runs."""
    staged = [run.staged for run in runs]
    barrier = [run.barrier for run in runs]
    rolling = [run.rolling for run in runs]
    return Line(
        scenario,
        len(runs),
        percentile(staged, 0.5),
        percentile(staged, 0.99),
        percentile(barrier, 0.5),
        percentile(barrier, 0.99),
        percentile([run.pause for run in runs], 0.99),
        percentile(rolling, 0.5),
        percentile(rolling, 0.99),
        sum(run.refused for run in runs) / len(runs),
    )


def keys(lines: Sequence[Line]) -> dict[str, float | bool | None]:
    """Return the figures of the JSON line; None stands for never."""
    found: dict[str, float | bool | None] = {}
    for line in lines:
        name = line.scenario.name
        found[f"{name}_staged_p99_s"] = _number(line.staged_p99)
        found[f"{name}_barrier_p50_s"] = _number(line.barrier_p50)
        found[f"{name}_barrier_p99_s"] = _number(line.barrier_p99)
        found[f"{name}_pause_p99_s"] = _number(line.pause_p99)
        found[f"{name}_rolling_p99_s"] = _number(line.rolling_p99)
        if is_wanted(line.scenario):
            found[f"{name}_barrier_p99_wanted_s"] = WANTED_S
            found["met"] = line.barrier_p99 <= WANTED_S
    return found


def table(lines: Sequence[Line]) -> str:
    """Return these lines as Markdown."""
    names = (
        *("payload", "hosts", "store", "differs", "staged p50; p99", "barrier p50; p99"),
        *("its pause p99", "rolling p50; p99", "503"),
    )
    head = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    return "\n".join([*head, *map(_row, lines)]) + "\n"


def constants_table() -> str:
    """Return every constant with its source as Markdown."""
    head = ["| constant | value | unit | source |", "|---|---|---|---|"]
    body = [f"| `{row.name}` | {_plain(row.value)} | {row.unit} | {row.source} |" for row in rows()]
    return "\n".join([*head, *body]) + "\n"


def _row(line: Line) -> str:
    scenario = line.scenario
    cells = [
        scenario.payload.name,
        f"{scenario.hosts:,}",
        scenario.store.value,
        scenario.note,
        f"{_text(line.staged_p50)}; {_text(line.staged_p99)}",
        f"{_text(line.barrier_p50)}; {_text(line.barrier_p99)}",
        _text(line.pause_p99),
        f"{_text(line.rolling_p50)}; {_text(line.rolling_p99)}",
        f"{line.refused:,.0f}",
    ]
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def _number(value: float) -> float | None:
    return float(f"{value:.3g}") if math.isfinite(value) else None


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value.is_integer() else f"{value:.4g}"


def _text(value: float) -> str:
    if math.isinf(value):
        return "never"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
