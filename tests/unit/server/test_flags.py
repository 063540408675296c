"""What `weightsync-server --help` prints, and what a wrong flag is answered."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from weightsync_server.flags import Flags, groups


def _run(*arguments: str, columns: int = 80) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "weightsync_server.cli", *arguments],
        env=os.environ | {"COLUMNS": str(columns)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def page() -> str:
    ran = _run("--help")
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout


def _groups_of(page: str) -> dict[str, list[str]]:
    """Return the flags that a page of help has under each title, in its order."""
    found: dict[str, list[str]] = {}
    for part in re.split(r"^(?=\w[^\n]*:\n  --)", page, flags=re.MULTILINE)[1:]:
        title, _, rest = part.partition(":\n")
        found[title] = re.findall(r"^  (--[\w-]+)", rest, re.MULTILINE)
    return found


def test_help_begins_with_the_ten_that_every_server_needs(page: str) -> None:
    found = _groups_of(page)
    # An extension's, which can be taken away.
    trainers = ["Supervised trainers"] if "trainer" in Flags.model_fields else []
    assert list(found) == [
        "Settings that every server needs",
        "Engines",
        "Callers",
        "Pushes",
        "Versions on disk",
        "Applies",
        "Fleets",
        "Following an origin",
        *trainers,
        "Log and shutdown",
    ]
    assert next(iter(found.values())) == [
        "--name", "--engine", "--listen", "--authority", "--tls-cert", "--tls-key", "--store",
        "--slots", "--memory-bytes", "--metrics",
    ]  # fmt: skip


def test_help_has_every_setting_once(page: str) -> None:
    flags = [flag for some in _groups_of(page).values() for flag in some]
    settings = [f"--{name.replace('_', '-')}" for name in Flags.model_fields]
    assert sorted(flags) == sorted(settings)
    assert len(settings) > 70


def test_help_tells_values_and_defaults_in_plain_words(page: str) -> None:
    assert (
        "  --slots N\n      Versions held in memory. With 3, rollback is instant. (default: 2)"
        in page
    )
    assert "  --metrics-open, --no-metrics-open\n" in page
    for python in ("<", "lambda", "factory", "list[", "None", "null", "Path", "gethostname"):
        assert python not in page, python


@pytest.mark.parametrize("columns", [60, 80, 300])
def test_help_is_as_wide_as_the_terminal_and_at_most_100_columns(columns: int) -> None:
    widest = max(map(len, _run("-h", columns=columns).stdout.splitlines()))
    assert 50 < widest <= min(columns, 100)


def test_an_unknown_flag_is_answered_in_one_line() -> None:
    ran = _run("--no-such-flag", "1")
    assert ran.returncode == 2
    assert ran.stderr == (
        "weightsync-server: unrecognized arguments: --no-such-flag 1; `weightsync-server --help` "
        "lists all flags\n"
    )


def test_a_setting_in_no_group_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync_server.flags._GROUPS", {"First": "slots name"})
    (first, some), (last, others) = groups()
    assert (first, last) == ("First", "Other settings")
    assert {one.variable for one in some} == {"WEIGHTSYNC_NAME", "WEIGHTSYNC_SLOTS"}
    assert len(some) + len(others) == len(Flags.model_fields)
