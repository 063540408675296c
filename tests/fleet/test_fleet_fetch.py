"""What a fleet has decided comes to each member, also where the origin has newer versions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.fleet_servers import all_serve, push
from tests.support.following import FollowingServer, until
from tests.support.object_servers import ObjectServer
from weightsync.errors import Reason
from weightsync_client import ClientError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weightsync_client import Client

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=["file", "grpc", "s3"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_new_member_serves_what_was_decided_and_the_fleet_goes_back(
    kind: str, request: pytest.FixtureRequest, folder: Path
) -> None:
    fleet = ["--fleet", "f", "--fleet-register", f"file://{folder}/register", "--fleet-member"]
    variables: Mapping[str, str] = {}
    store = f"file://{folder}/store"
    if kind == "s3":
        bucket: ObjectServer = request.getfixturevalue("bucket")
        store, variables = f"{bucket.url}/{folder.name}", bucket.environment()
    origin = FollowingServer(folder / "a", "--store", store, *fleet, "a", variables=variables)
    url = f"grpc://{origin.address}" if kind == "grpc" else store
    late = FollowingServer(folder / "b", "--follow", url, *fleet, "b", variables=variables, seed=5)
    with origin.running() as trainer:
        before = push(trainer, 1)
        trainer.fleet_apply(before, order="barrier")
        decided = push(trainer, 2)
        trainer.fleet_apply(decided, order="barrier")
        newer, newest = push(trainer, 3), push(trainer, 4)
        with late.running() as client:
            clients = {"a": trainer, "b": client}
            all_serve(clients, decided)
            until(lambda: newest in numbers(client), "the newest is here, too")
            assert newer not in numbers(client)
            # It goes to one that it has skipped, and back to one that was before its time.
            assert client.fleet_apply(newer).decision == "COMMIT"
            all_serve(clients, newer)
            with pytest.raises(ClientError, match=f"the newest there is {newest}") as caught:
                client.fleet_apply(newest + 1)
            assert caught.value.reason is Reason.VERSION_UNKNOWN
            for version in (decided, before):
                assert client.fleet_rollback(order="barrier").decision == "COMMIT"
                all_serve(clients, version)
            assert "no version can be fetched" not in late.log


def numbers(client: Client) -> set[int]:
    return {version.version for version in client.versions()}
