"""Pages on fleets: their commands are ones that a server takes, their figures the simulation's."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from pydantic_settings import CliApp

from tests.support.fleet_page import PAGE, commands
from weightsync_server.flags import Flags

DOCS = Path(__file__).parents[3] / "docs"
SCALE = (DOCS / "explain/fleet-scale.md").read_text()
#: Where a figure of the page is in the simulation's table: payload, hosts, store, what differs, and
#: the column, counted from 0.
BARRIER, ROLLING = 5, 7


def _simulated(payload: str, hosts: str, store: str, differs: str, column: int) -> str:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in SCALE.splitlines()]
    (found,) = (row for row in rows if row[:4] == [payload, hosts, store, differs])
    return found[column]


def _row(begin: str) -> str:
    (found,) = (line for line in PAGE.splitlines() if line.startswith(begin))
    return found


@pytest.mark.parametrize("line", commands("weightsync-server"))
def test_a_server_takes_its_flags(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_FLEET_MEMBER", "host7")
    settings = CliApp.run(Flags, cli_args=shlex.split(line)[1:]).tree
    assert settings.paths.store or settings.replica.url or settings.listeners.authority


@pytest.mark.parametrize(
    ("begin", "hosts", "store", "differs"),
    [
        ("| 2 to 8 ", "10", "origin", ""),
        ("| 10 |", "10", "s3", ""),
        ("| 100 | the same ", "100", "s3", ""),
        ("| 100 | a store ", "100", "own", ""),
        ("| 1,000 |", "1,000", "s3", "ranges of 16 MiB"),
    ],
)
def test_times_to_live_are_those_of_the_simulation(
    begin: str, hosts: str, store: str, differs: str
) -> None:
    delta, full = (cell.strip() for cell in _row(begin).split("|")[-3:-1])
    assert delta == _simulated("delta15", hosts, store, "", BARRIER)
    assert full == _simulated("full15", hosts, store, differs, BARRIER)


@pytest.mark.parametrize(
    ("begin", "differs", "column"),
    [
        ("5. **A thousand**", "4 partitions", BARRIER),
        ("| `--max-unavailable` ", "", ROLLING),
        ("| `--max-unavailable` ", "waves of 10", ROLLING),
        ("| `--fetchers` ", "4 fetchers", BARRIER),
        ("| `--fetchers` ", "", BARRIER),
    ],
)
def test_what_settings_give_is_that_of_the_simulation(
    begin: str, differs: str, column: int
) -> None:
    assert _simulated("delta15", "1,000", "s3", differs, column) in _row(begin)


def test_defaults_are_those_of_the_settings() -> None:
    rows = re.findall(r"^\| `--([a-z-]+)` \| ([^|]+) \|", PAGE, re.MULTILINE)
    assert len(rows) >= 8
    for name, default in rows:
        field = Flags.model_fields[name.replace("-", "_")]
        wanted = "5/8 of the cores, 2 to 16" if name == "fetchers" else str(field.default)
        assert default == wanted, name
