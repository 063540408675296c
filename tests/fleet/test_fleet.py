"""A fleet of real servers over each kind of register: one decision, on every host or on none."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import pty
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.fleet_registers import place_of
from tests.support.fleet_servers import FleetServers, live, push
from tests.support.following import until
from weightsync.errors import Reason
from weightsync_client import ApplyKind, AsyncClient, Client, ClientError, FleetOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# Four servers start, and a dozen commands.
pytestmark = pytest.mark.timeout(180)


def run(fleet: FleetServers, name: str, *arguments: str) -> str:
    """Return what the command prints that is asked of a member."""
    command = Path(sys.executable).with_name("weightsync")
    address = fleet.servers[name].address
    done = subprocess.run(
        [command, *arguments, "--address", address], capture_output=True, text=True, check=True
    )
    return done.stdout


async def again(address: str, version: int) -> int:
    """Return what the fleet has decided, having asked for a version as asynchronous code does."""
    async with AsyncClient(address) as client:
        report = await client.fleet_apply(version, order="barrier")
        assert report.decision == "COMMIT"
        return (await client.fleet_status()).decided_version


def _runs(client: Client) -> bool:
    newest = client.fleet_status().newest
    return newest is not None and not newest.decision


def run_in_terminal(fleet: FleetServers, name: str, *arguments: str) -> tuple[str, str]:
    """Return what the command prints, and what a terminal shows meanwhile."""
    command = Path(sys.executable).with_name("weightsync")
    address = fleet.servers[name].address
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [command, *arguments, "--address", address], stdout=subprocess.PIPE, stderr=theirs
    ) as process:
        os.close(theirs)
        shown = b""
        # The end of a terminal is an error on Linux.
        with contextlib.suppress(OSError):
            while piece := os.read(ours, 65536):
                shown += piece
        os.close(ours)
        assert process.stdout is not None
        printed = process.stdout.read().decode()
    assert process.returncode == 0
    return printed, shown.decode()


@pytest.fixture(
    params=[
        "etcd",
        *(pytest.param(kind, marks=pytest.mark.battery) for kind in ("folder", "bucket")),
    ]
)
def fleet(
    request: pytest.FixtureRequest, program: Callable[[str, str], str], tmp_path: Path
) -> Iterator[FleetServers]:
    etcd = program("etcd", "etcd-server") if request.param == "etcd" else ""
    with place_of(request.param, etcd, tmp_path) as place:
        yield FleetServers(tmp_path, place)


def test_barrier_rolling_and_rollback(fleet: FleetServers, tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    plan.touch()
    fleet.servers["b"].variables["WEIGHTSYNC_FAILPOINTS"] = f"@{plan}"
    with fleet.running() as clients:
        until(lambda: len(clients["a"].fleet_status().members) == len(fleet.names), "all are there")
        second = push(clients["a"], 2)
        report = clients["b"].fleet_apply(second, order="barrier", idempotency_key="k")
        assert (report.decision, report.order) == ("COMMIT", FleetOrder.BARRIER)
        assert [one.name for one in report.members] == list(fleet.names)
        assert all(one.done for one in report.members)
        assert {live(client) for client in clients.values()} == {second}
        for name, client in clients.items():
            kinds = {one.kind: one for one in client.applies() if one.version == second}
            assert kinds[ApplyKind.MEMBER].requested_by.startswith("fleet ")
            assert kinds[ApplyKind.MEMBER].fleet_apply == report.apply
            assert (ApplyKind.FLEET_APPLY in kinds) is (name == "b"), "the one that was called"
        # The key is one call's in the whole fleet.
        assert clients["c"].fleet_apply(second, order="barrier", idempotency_key="k") == report
        with pytest.raises(ClientError, match="use `weightsync fleet rollback`") as caught:
            clients["a"].rollback()
        assert caught.value.reason is Reason.NOT_SUPPORTED

        third = push(clients["a"], 3)
        report = clients["c"].fleet_apply(third)
        assert (report.decisions, report.decisions_needed) == (4, 4)
        assert {live(client) for client in clients.values()} == {third}
        # They announce it after they have done it.
        until(lambda: clients["a"].fleet_status().undecided == 0, "members say that they serve")
        status = clients["a"].fleet_status()
        assert (status.decided_version, status.undecided) == (third, 0)
        assert status.newest == report
        until(lambda: clients["a"].fleet_status().skew == 0, "members say what they hold")

        shown = json.loads(run(fleet, "b", "fleet", "status", "--json"))
        assert (shown["fleet"], shown["member"]) == ("f", "b")
        assert shown["newest"] == json.loads(json.dumps(dataclasses.asdict(report)))
        assert run(fleet, "c", "fleet", "members").splitlines()[0].startswith("a: serving, ")
        fourth = push(clients["a"], 4)
        plan.write_text("fleet.prepare=1*sleep(2)")
        chosen = "--order", "barrier", "--pause", "wait", "--wait-timeout", "0.5"
        text, shown = run_in_terminal(fleet, "c", "fleet", "apply", str(fourth), *chosen)
        assert "COMMIT" in text
        assert "live on 3 of 3 members" in text
        assert "2 of 3 prepared" in shown
        assert "prepared" not in text
        metric = fleet.servers["a"].metric
        # A member under load may be a lease late; it is counted again once it has renewed.
        until(lambda: metric("weightsync_fleet_members") == len(fleet.names), "all are counted")
        assert fleet.servers["a"].metric("weightsync_fleet_undecided") == 0
        assert fleet.servers["a"].metric("weightsync_fleet_decision_age_seconds") > 0

        report = clients["a"].fleet_rollback("bad answers", order="barrier")
        assert (report.version, report.rollback_reason) == (third, "bad answers")
        assert "a rollback because: bad answers" in run(fleet, "c", "fleet", "status")
        assert asyncio.run(again(fleet.servers["c"].address, third)) == third
        assert {live(client) for client in clients.values()} == {third}
        for client in clients.values():
            until(
                lambda client=client: client.get_version(fourth).serving == "rejected",  # type: ignore[misc]  # bound at once
                "what was left is rejected",
            )
        with pytest.raises(ClientError) as caught:
            clients["a"].fleet_apply(fourth)
        assert caught.value.reason is Reason.VERSION_REJECTED
        text = run(fleet, "b", "fleet", "apply", str(fourth), "--clear-rejected")
        assert "COMMIT" in text
        assert {live(client) for client in clients.values()} == {fourth}
        assert clients["c"].get_version(fourth).serving != "rejected"

        assert "no apply of the fleet is running" in run(fleet, "b", "fleet", "abort")
        fifth = push(clients["a"], 5)
        # Longer than a command takes to start; whoever aborts ends it.
        plan.write_text("fleet.prepare=1*sleep(40)")
        with ThreadPoolExecutor(1) as pool:
            applying = pool.submit(clients["a"].fleet_apply, fifth, order="barrier")
            until(lambda: _runs(clients["c"]), "it runs")
            text = run(fleet, "b", "fleet", "abort", "--reason", "the wrong one")
            assert "ABORT (it was ended by a call: the wrong one)" in text
            with pytest.raises(ClientError, match="the wrong one"):
                applying.result()
        assert clients["c"].fleet_rollback(order="barrier").decision == "COMMIT"
