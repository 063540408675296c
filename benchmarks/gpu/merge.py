"""Merges the lines that the parts printed into one table in Markdown.

`python -m benchmarks.gpu.merge FILES`. Lines that are no result are skipped, so that whole logs can
be given; of a part that was run several times the last line counts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.limits import FIGURES

__all__ = ["main", "merge", "read_lines"]

#: Of a line, what is no figure.
_OTHER = {"benchmark", "parameters", "spread", "machine", "beside", "errors"}
_MACHINE = (
    "gpu",
    "gpus",
    "vllm",
    "torch",
    "requests",
    "tp",
    "bytes",
    "executor",
    "cuda_graphs",
    "store",
)


def read_lines(texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the result of each part by its name.

    Args:
        texts: Contents of files.
    """
    found: dict[str, dict[str, Any]] = {}
    for line in (line for text in texts for line in text.splitlines()):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and value.get("benchmark") == "gpu":
            found[value["parameters"]["part"]] = value
    return found


def merge(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the parts as one table, and below it what each ran on and what failed."""
    rows = ["| part | figure | median | lowest .. highest | limit or peer | ratio | wanted |"]
    rows.append("|---|---|---|---|---|---|---|")
    for part, line in results.items():
        for figure, value in line.items():
            # Every part measures the limits; one row each is enough, and ratios use their own.
            if figure in _OTHER or (part != "limits" and "limits" in results and figure in FIGURES):
                continue
            rows.append(_row(part, figure, value, line))
    notes = [note for part, line in results.items() for note in _notes(part, line)]
    return "\n".join([*rows, "", *notes]) + "\n"


def _row(part: str, figure: str, value: Any, line: Mapping[str, Any]) -> str:
    spread = line.get("spread", {}).get(figure)
    around = f"{spread['min']} .. {spread['max']} ({spread['rounds']})" if spread else ""
    held = line.get("beside", {}).get(figure)
    cells = [part, f"`{figure}`", _told(value), around]
    if held is None:
        cells += ["", "", ""]
    else:
        wanted = held.get("wanted", "")
        if wanted:
            wanted += "" if held["met"] else ", **missed**"
        cells += [f"{held['limit']} ({held['is']})", _told(held["ratio"]), wanted]
    return f"| {' | '.join(cells)} |"


def _told(value: Any) -> str:
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _notes(part: str, line: Mapping[str, Any]) -> list[str]:
    about = {**line["parameters"], **line.get("machine", {})}
    names = [*(name for name in _MACHINE if name in about), "cores", "load_1m"]
    ran = ", ".join(f"{name} {about[name]}" for name in names if name in about)
    return [f"- {part}: {ran}", *(f"- {part} failed: {error}" for error in line["errors"])]


def main() -> None:
    """Print the table of the files named on the command line."""
    if len(sys.argv) < 2:
        sys.exit("name the files that hold the parts' lines")
    results = read_lines(Path(name).read_text(errors="replace") for name in sys.argv[1:])
    if not results:
        sys.exit("no line of `python -m benchmarks.gpu --json` in these files")
    print(merge(results), end="")


if __name__ == "__main__":
    main()
