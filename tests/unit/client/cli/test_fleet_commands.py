"""What `fleet status` prints of members."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync_client.cli.fleet_commands import _show_members
from weightsync_client.fleet_types import FleetMemberStatus, FleetStatus

if TYPE_CHECKING:
    import pytest


def test_a_member_of_an_older_release_is_shown_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    members = (
        FleetMemberStatus("a", "a:1", 41, "d41", "serving", "0.2.0"),
        FleetMemberStatus("b", "b:1", 40, "d40", "serving", "0.1.0", older=True),
        FleetMemberStatus("c", "", 0, "", "fenced", "", older=True),
    )
    _show_members(FleetStatus("f", "file:///r", "a", members, None, 41, "d41", 1, 0, None))
    assert capsys.readouterr().out.splitlines() == [
        "a: serving, version 41 d41, a:1",
        "b: serving, version 40 d40, b:1, of an older release 0.1.0: update it",
        "c: fenced, nothing, no address, of an older release: update it",
    ]
