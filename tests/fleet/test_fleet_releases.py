"""Two releases in one fleet: servers from the wheel of this tree beside servers of the next one."""

from __future__ import annotations

import sys
import time
import zipfile
from typing import TYPE_CHECKING

import pytest

from tests.support.fleet_registers import FolderPlace
from tests.support.fleet_servers import FleetServers, all_serve, push
from tests.support.following import until
from tests.support.wheels import ROOT, build_wheel, export_tree, run_command
from weightsync.errors import Reason
from weightsync_client import Client, ClientError

if TYPE_CHECKING:
    from pathlib import Path

# A wheel is built first.
pytestmark = pytest.mark.timeout(240)

_OLDER = ("-c", "from weightsync_server.cli import main; main()")
_NEWER = ("-m", "tests.support.newer_release")
#: A member has read what is decided long before.
_LONG_ENOUGH_S = 3.0


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of today, unpacked."""
    folder = tmp_path_factory.mktemp("older")
    with zipfile.ZipFile(build_wheel(export_tree(folder / "export"))) as wheel:
        wheel.extractall(folder / "packages")
    return folder / "packages"


@pytest.fixture
def fleet(tmp_path: Path, installed: Path) -> FleetServers:
    """Of `n`, the newer release's, and `o`, the older one's; `n` takes the pushes."""
    made = FleetServers(tmp_path, FolderPlace(tmp_path), ("n", "o"))
    _run_newer(made, "n")
    program = "import weightsync_server; print(weightsync_server.__file__)"
    found = run_command(sys.executable, "-c", program, cwd=tmp_path, PYTHONPATH=str(installed))
    assert found.startswith(str(installed))
    made.servers["o"].command = (sys.executable, *_OLDER)
    made.servers["o"].variables["PYTHONPATH"] = str(installed)
    return made


def _run_newer(fleet: FleetServers, name: str) -> None:
    fleet.servers[name].command = (sys.executable, *_NEWER)
    fleet.servers[name].variables["PYTHONPATH"] = str(ROOT)


def test_a_fleet_of_two_releases_goes_on_and_refuses_what_one_does_not_know(
    fleet: FleetServers,
) -> None:
    older = fleet.servers["o"]
    with fleet.servers["n"].running() as n:
        with older.running() as o:
            until(lambda: len(n.fleet_status().members) == 2, "both are there")
            for asked, seen in ((n, {"n": False, "o": True}), (o, {"n": False, "o": False})):
                assert {one.name: one.older for one in asked.fleet_status().members} == seen
            # Each may ask for what both know, and the other takes part.
            for number, asked, order in ((2, n, "barrier"), (3, o, "rolling")):
                report = asked.fleet_apply(push(n, number), order=order)
                assert report.decision == "COMMIT"
                assert all(one.done for one in report.members)
            _refused(n, push(n, 4), "barrier")
            _refused(n, 4, "rolling")
            all_serve({"n": n, "o": o}, 3)
        # One that starts anew is not held up by what was decided against.
        with older.running() as o:
            all_serve({"n": n, "o": o}, 3)
            assert o.fleet_apply(4, order="barrier").decision == "COMMIT"
            assert n.fleet_rollback(order="barrier").version == 3
            all_serve({"n": n, "o": o}, 3)
        _run_newer(fleet, "o")
        with older.running() as o:
            until(lambda: len(n.fleet_status().members) == 2, "it is there again")
            report = o.fleet_apply(push(n, 5), order="rolling", pause="abort")
            assert report.decision == "COMMIT"
            all_serve({"n": n, "o": o}, 5)


def test_one_that_missed_what_it_cannot_read_serves_nothing(fleet: FleetServers) -> None:
    older = fleet.servers["o"]
    with fleet.servers["n"].running() as n:
        with older.running() as o:
            until(lambda: len(n.fleet_status().members) == 2, "both are there")
            assert n.fleet_apply(push(n, 2), order="barrier").decision == "COMMIT"
            all_serve({"n": n, "o": o}, 2)
        until(lambda: len(n.fleet_status().members) == 1, "it is missed")
        assert n.fleet_apply(push(n, 3), order="barrier", pause="abort").decision == "COMMIT"
        older.spawn()
        try:
            with Client(older.address) as o:
                until(lambda: len(n.fleet_status().members) == 2, "it is there again")
                end = time.monotonic() + _LONG_ENOUGH_S
                while time.monotonic() < end:
                    assert not o.health("serving"), older.log
                    time.sleep(0.1)
                # The next one in words that it knows takes it along.
                assert n.fleet_apply(push(n, 4), order="barrier").decision == "COMMIT"
                all_serve({"n": n, "o": o}, 4)
        finally:
            older.kill()


def _refused(client: Client, version: int, order: str) -> None:
    with pytest.raises(ClientError, match="o is not prepared: the plan has format") as caught:
        client.fleet_apply(version, order=order, pause="abort", idempotency_key=order)
    assert "update this member, or apply with the older release" in str(caught.value)
    assert caught.value.reason is Reason.APPLY_RESTORED
