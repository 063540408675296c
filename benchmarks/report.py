"""One JSON line per benchmark: parameters, medians, and how far the rounds lay apart."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["arguments", "emit", "median", "short"]


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the benchmark's docstring, with the flag --json."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of text")
    return parser


def median(samples: Sequence[float]) -> float:
    """Return the median, to four significant digits."""
    return short(statistics.median(samples))


def emit(
    benchmark: str,
    parameters: Mapping[str, Any],
    samples: Mapping[str, Sequence[float]],
    facts: Mapping[str, Any] | None = None,
    *,
    as_json: bool,
) -> None:
    """Print the result on standard output.

    Args:
        benchmark: Its name.
        parameters: What was measured: sizes, counts, rounds.
        samples: One value per round of each figure; the figure is their median.
        facts: Figures that are no median, such as `bitwise_equal`.
        as_json: One line for machines, or lines for people.
    """
    figures = {name: median(values) for name, values in samples.items()} | dict(facts or {})
    spread = {
        name: {"min": short(min(values)), "max": short(max(values)), "rounds": len(values)}
        for name, values in samples.items()
    }
    if as_json:
        line = {"benchmark": benchmark, "parameters": dict(parameters), **figures}
        print(json.dumps({**line, "spread": spread, "machine": _machine()}))
        return
    print(benchmark, ", ".join(f"{name}={value}" for name, value in parameters.items()))
    for name, value in figures.items():
        around = f"  ({spread[name]['min']} .. {spread[name]['max']})" if name in spread else ""
        print(f"  {name:32} {value}{around}")


def short(value: float) -> float:
    """Return a figure to four significant digits, as every one is told."""
    return float(f"{value:.4g}")


def _machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "architecture": platform.machine(),
        "load_1m": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }
