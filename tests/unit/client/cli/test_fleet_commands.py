"""What the commands about a fleet print."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from weightsync_client import Client
from weightsync_client.cli.fleet_commands import _show_members, _show_report, fleet
from weightsync_client.types import (
    FleetMemberReport,
    FleetMemberStatus,
    FleetOrder,
    FleetReport,
    FleetStatus,
)


def test_a_member_of_an_older_release_is_shown_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    members = (
        FleetMemberStatus("a", "a:1", 41, "d41", "serving", "0.2.0"),
        FleetMemberStatus("b", "b:1", 40, "d40", "serving", "0.1.0", older=True),
        FleetMemberStatus("c", "", 0, "", "fenced", "", older=True),
        FleetMemberStatus("d", "d:1", 40, "d40", "fenced", "0.2.0", reason="the register is away"),
    )
    _show_members(FleetStatus("f", "file:///r", "a", members, None, 41, "d41", 1, 0, None))
    assert capsys.readouterr().out.splitlines() == [
        "a: serving, version 41 d41, a:1",
        "b: serving, version 40 d40, b:1, of an older release 0.1.0: update it",
        "c: fenced, nothing, no address, of an older release: update it",
        "d: fenced (the register is away), version 40 d40, d:1",
    ]


def test_one_that_is_fenced_counts(capsys: pytest.CaptureFixture[str]) -> None:
    one = FleetMemberReport("a", 1, prepared=True, ready=False, done=True)
    order = FleetOrder.ROLLING
    _show_report(
        FleetReport(3, 7, "d7", "COMMIT", "", order, 2, 2, (one,), "slow", fenced_others=("c",))
    )
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("live on 1 of 2 members, a rollback because: slow")
    assert second.startswith("  c: fenced, and no part of this apply")


@pytest.mark.parametrize("verdict", ["", "ABORT", "COMMIT"])
def test_an_abort_tells_what_was_decided(verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = FleetReport(3, 7, "d7", verdict, "", FleetOrder.BARRIER, 1, 1, ())
    answer = report if verdict else None
    asked: list[str] = []

    def fleet_abort(_: Client, reason: str) -> FleetReport | None:
        asked.append(reason)
        return answer

    monkeypatch.setattr(Client, "fleet_abort", fleet_abort)
    done = CliRunner().invoke(fleet, ["abort", "--reason", "wrong one", "--model", "m"])
    assert (done.exit_code, asked) == (0, ["wrong one"])
    if verdict:
        assert f"apply 3, barrier: {verdict}, version 7" in done.output
    else:
        assert "no apply of the fleet is running, so none was aborted" in done.output
