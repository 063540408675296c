"""An origin without engines is no member of its followers' fleet, and keeps what they serve."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.support.fleet_servers import live, push
from tests.support.following import FollowingServer, until
from tests.support.weightsync_server import short_server
from weightsync_client import Client

pytestmark = pytest.mark.timeout(120)


def test_what_a_follower_serves_stays_in_the_origin() -> None:
    with tempfile.TemporaryDirectory(prefix="wso") as name:
        folder = Path(name)
        fleet = ["--fleet", "f", "--fleet-register", f"file://{folder}/register"]
        store = f"file://{folder}/store"
        follower = FollowingServer(folder / "b", "--follow", store, *fleet, "--fleet-member", "b")
        flags = ["--engine=none", "--retain-versions", "2", *fleet]
        with (
            short_server(store=store, flags=flags) as origin,
            Client(origin.address) as trainer,
        ):
            first = push(trainer, 1)
            with follower.running() as client:
                until(lambda: first in numbers(client), "the version is here")
                assert client.fleet_apply(first, order="barrier").decision == "COMMIT"
                assert live(client) == first
                *_, before, newest = [push(trainer, number) for number in range(2, 7)]
                # Without the fleet the oldest would be the first to go.
                kept = {first, before, newest}
                until(lambda: numbers(trainer) == kept, "the others are collected")
                assert [one.name for one in client.fleet_status().members] == ["b"]


def numbers(client: Client) -> set[int]:
    return {version.version for version in client.versions()}
