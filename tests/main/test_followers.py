"""Servers that follow another one, or its store: what is committed there is served here as well."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import grpc
import pytest
import torch

from benchmarks.servers import free_port
from tests.support.certificates import Authority
from tests.support.following import FollowingServer, checkpoint, staged, step, until
from tests.support.object_servers import ObjectServer
from tests.support.secured import authority_text
from tests.support.serving import wait_serving
from tests.support.shard_cache import unasked_cache
from weightsync import failpoints
from weightsync.errors import Reason
from weightsync_client import Client, ClientError, PushKind, RefusedError
from weightsync_server.auth.principals import new_token, token_hash
from weightsync_server.catalog.record import local_number

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(params=["file", "grpc", "s3"])
def pair(request: pytest.FixtureRequest, folder: Path) -> tuple[FollowingServer, FollowingServer]:
    """Return an origin and a follower of it, neither started."""
    if request.param == "s3":
        bucket: ObjectServer = request.getfixturevalue("bucket")
        url = f"{bucket.url}/{folder.name}"
        variables = bucket.environment()
        origin = FollowingServer(folder / "a", "--store", url, variables=variables)
        return origin, FollowingServer(folder / "b", "--follow", url, variables=variables)
    origin = FollowingServer(folder / "a")
    urls = {"file": f"file://{origin.store}", "grpc": f"grpc://{origin.address}"}
    return origin, FollowingServer(folder / "b", "--follow", urls[request.param])


#: Once over each kind of origin in CI; of what does not depend on it, the rest is in the battery.
_over_one = pytest.mark.parametrize(
    "pair",
    [
        "grpc",
        pytest.param("file", marks=pytest.mark.battery),
        pytest.param("s3", marks=pytest.mark.battery),
    ],
    indirect=True,
)


def _equal(client: Client, version: int, expected: dict[str, torch.Tensor]) -> bool:
    found = {tensor.name: tensor.torch().clone() for tensor in client.tensors(version)}
    same = found.keys() == expected.keys()
    return same and all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def _push(client: Client, tensors: dict[str, torch.Tensor], number: int) -> int:
    metadata = {"step": str(number)}
    return client.push(step(tensors, number), delta="auto", metadata=metadata).version


def test_a_follower_has_each_version_before_it_is_asked_to_apply_it(
    pair: tuple[FollowingServer, FollowingServer],
) -> None:
    origin, follower = pair
    tensors = checkpoint(2)
    with origin.running() as trainer, follower.running() as client:
        trainer.acquire_epoch()
        kinds = []
        for number in range(4):
            version = trainer.get_version(_push(trainer, tensors, number))
            until(partial(staged, client, version), f"version {version.version} is staged")
            here = client.get_version(version.version)
            # The first one may have come before its base did.
            assert number == 0 or here.base_version == version.base_version
            kinds.append(here.kind)
            client.apply(version.version)
            proof = client.verify()
            assert proof.verified
            assert proof.content_digest == version.content_digest
        assert kinds[1:] == [PushKind.DELTA] * 3
        assert _equal(client, version.version, tensors)
        client.rollback()
        assert client.verify().version == version.version - 1


@_over_one
def test_one_that_was_away_goes_straight_to_the_newest(
    pair: tuple[FollowingServer, FollowingServer],
) -> None:
    origin, follower = pair
    tensors = checkpoint(2)
    with origin.running() as trainer:
        with follower.running() as client:
            first = trainer.get_version(_push(trainer, tensors, 0))
            until(lambda: staged(client, first), "the first version is staged")
        for number in range(1, 13):
            newest = trainer.get_version(_push(trainer, tensors, number))
        assert newest.chain_length == 12
        with follower.running() as client:
            until(lambda: staged(client, newest), "the newest version is staged")
            assert _equal(client, newest.version, tensors)
            here = {version.version for version in client.versions()}
            assert not here & set(range(first.version + 1, newest.version))
            # From there on deltas do again.
            after = trainer.get_version(_push(trainer, tensors, 13))
            until(lambda: staged(client, after), "the version after it is staged")
            assert client.get_version(after.version).kind is PushKind.DELTA
            assert _equal(client, after.version, tensors)


@_over_one
def test_it_serves_from_its_cache_while_the_origin_is_dead(
    pair: tuple[FollowingServer, FollowingServer],
) -> None:
    origin, follower = pair
    tensors = checkpoint(2)
    with origin.running() as trainer:
        with follower.running() as client:
            for number in range(3):
                version = trainer.get_version(_push(trainer, tensors, number))
                until(partial(staged, client, version), f"version {version.version} is staged")
        origin.kill()
        if follower.variables:
            # The store lives on without the server that filled it: it is cut off instead.
            follower.variables["AWS_ENDPOINT_URL"] = "http://127.0.0.1:1"
        elif (origin.folder / "state").exists():
            (origin.folder / "state").rename(origin.folder / "gone")
    with follower.running() as client:
        until(lambda: staged(client, version), "the newest version is staged")
        client.apply()
        proof = client.verify()
        assert (proof.verified, proof.version) == (True, version.version)
        client.rollback()
        client.apply(version.version, clear_rejected=True)
        assert _equal(client, version.version, tensors)
    assert "which it has, is served" in follower.log


def test_pushes_to_a_follower_are_refused_with_the_name_of_the_origin(folder: Path) -> None:
    origin = FollowingServer(folder / "a")
    url = f"grpc://{origin.address}"
    with origin.running(), FollowingServer(folder / "b", "--follow", url).running() as client:
        before = client.versions()
        for refused in (
            lambda: client.push(checkpoint(2)),
            client.acquire_epoch,
            lambda: client.abort("0" * 32),
        ):
            with pytest.raises(RefusedError, match=f"follows {url} and takes no pushes") as caught:
                refused()
            assert caught.value.reason is Reason.SERVER_FOLLOWS
            assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION
        assert client.versions() == before
        assert not client.health("push")


def test_a_follower_follows_a_follower(folder: Path) -> None:
    origin = FollowingServer(folder / "a")
    first = FollowingServer(folder / "b", "--follow", f"grpc://{origin.address}")
    by_server = FollowingServer(folder / "c", "--follow", f"grpc://{first.address}")
    by_store = FollowingServer(folder / "d", "--follow", f"file://{first.store}")
    tensors = checkpoint(2)
    with (
        origin.running() as trainer,
        first.running(),
        by_server.running() as one,
        by_store.running() as other,
    ):
        for number in range(2):
            version = trainer.get_version(_push(trainer, tensors, number))
            until(partial(staged, one, version), f"version {version.version} by the server")
            until(partial(staged, other, version), f"version {version.version} by its store")
        assert _equal(one, version.version, tensors)
        assert _equal(other, version.version, tensors)


@_over_one
@pytest.mark.parametrize("delta", [False, True], ids=["full", "delta"])
def test_one_that_is_killed_in_the_midst_of_a_fetch_goes_on(
    pair: tuple[FollowingServer, FollowingServer], *, delta: bool
) -> None:
    origin, follower = pair
    tensors = checkpoint(2)
    with origin.running() as trainer:
        if delta:
            with follower.running() as client:
                first = trainer.get_version(_push(trainer, tensors, 0))
                until(lambda: staged(client, first), "the first version is staged")
        newest = trainer.get_version(_push(trainer, tensors, 1))
        assert (newest.kind is PushKind.DELTA) == delta
        point = "follow.chunk=1>" if "grpc" in follower.flags[1] else "follow.shard="
        follower.variables[failpoints.VARIABLE] = f"{point}panic"
        assert follower.spawn().wait(60) == -signal.SIGKILL
        del follower.variables[failpoints.VARIABLE]
        with follower.running() as client:
            until(lambda: staged(client, newest), "the version is staged after all")
            assert _equal(client, newest.version, tensors)


@pytest.mark.parametrize("delta", [False, True], ids=["full", "delta"])
def test_damage_in_the_origin_becomes_no_version_and_is_tried_again(
    folder: Path, *, delta: bool
) -> None:
    origin = FollowingServer(folder / "a")
    follower = FollowingServer(
        folder / "b", "--follow", f"file://{origin.store}", "--metrics", "127.0.0.1:0"
    )
    tensors = checkpoint(2)
    with origin.running() as trainer:
        if delta:
            with follower.running() as client:
                first = trainer.get_version(_push(trainer, tensors, 0))
                until(lambda: staged(client, first), "the first version is staged")
        newest = trainer.get_version(_push(trainer, tensors, 1))
        name = "delta-0.safetensors" if delta else "0.safetensors"
        shard = origin.store / "default" / f"v{newest.version}" / name
        good = shard.read_bytes()
        shard.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        with follower.running() as client:
            until(lambda: follower.metric("weightsync_follow_failures_total") > 2, "it has failed")
            assert follower.metric("weightsync_follow_lag_versions") == 1
            held = {version.version for version in client.versions() if version.content_digest}
            assert newest.version not in held
            with pytest.raises(ClientError):
                client.apply(newest.version)
            shard.write_bytes(good)
            until(lambda: staged(client, newest), "the version is staged after all")
            until(lambda: follower.metric("weightsync_follow_lag_versions") == 0, "it lags no more")
            assert follower.metric("weightsync_follow_origin_up") == 1
            assert _equal(client, newest.version, tensors)


def test_a_checkpoint_of_its_own_gets_no_number_of_the_origin(folder: Path) -> None:
    origin = FollowingServer(folder / "a", seed=1)
    url = f"grpc://{origin.address}"
    same = FollowingServer(folder / "b", "--follow", url, seed=1)
    other = FollowingServer(folder / "c", "--follow", url, seed=5)
    with origin.running() as trainer:
        (adopted,) = trainer.versions()
        with same.running() as client:
            until(lambda: len(client.versions()) == 1, "it has one version")
            assert client.versions()[0].content_digest == adopted.content_digest
            assert client.versions()[0].version == adopted.version
        with other.running() as client:
            until(lambda: staged(client, adopted), "the origin's version is staged")
            own = client.verify()
            assert own.content_digest != adopted.content_digest
            assert own.version == local_number(own.content_digest)
            # It is older than all that comes.
            assert client.apply().version == adopted.version
            pushed = trainer.push(checkpoint(7))
            until(lambda: staged(client, trainer.get_version(pushed.version)), "the push is here")
            assert client.apply().version == pushed.version
            client.rollback()
            assert client.verify().version == adopted.version
        with other.running() as client:
            # It goes on with what it served.
            assert client.verify().version == adopted.version
            assert {version.version for version in client.versions()} == {
                adopted.version,
                pushed.version,
                own.version,
            }


def test_a_cache_that_lies_is_found_out(bucket: ObjectServer, folder: Path) -> None:
    store = f"{bucket.url}/{folder.name}"
    variables = bucket.environment()
    origin = FollowingServer(folder / "a", "--store", store, variables=variables)
    with unasked_cache(bucket.port) as cache, origin.running() as trainer:
        flags = "--follow", store, "--follow-cache", cache.url(store)
        follower = FollowingServer(folder / "b", *flags, variables=variables)
        with follower.running() as client:
            pushed = trainer.get_version(trainer.push(checkpoint(2)).version)
            until(lambda: staged(client, pushed), "the version is staged")
            assert cache.asked
            assert "returned different bytes" not in follower.log
            cache.change = lambda data: bytes(len(data))
            pushed = trainer.get_version(trainer.push(checkpoint(3)).version)
            until(lambda: staged(client, pushed), "the version is staged all the same")
            assert "the cache returned different bytes than were stored" in follower.log
            client.apply(pushed.version)
            assert client.verify().content_digest == pushed.content_digest
            assert _equal(client, pushed.version, checkpoint(3))


def test_too_little_memory_is_refused_at_start(folder: Path) -> None:
    origin = FollowingServer(folder / "a")
    with origin.running() as trainer:
        trainer.push(checkpoint(2))
        follower = FollowingServer(
            folder / "b", "--follow", f"file://{origin.store}", "--memory-bytes", "200000"
        )
        assert follower.spawn().wait(60) == 1
        assert "in 2 slots" in follower.log
        assert "raise memory_bytes, lower slots" in follower.log


def test_it_follows_over_tls_with_a_token_of_the_role_for_that(folder: Path) -> None:
    authority = Authority(folder / "tls")
    pair = authority.sign("origin", "localhost")
    token = new_token()
    (folder / "authority.toml").write_text(
        authority_text(
            [
                {
                    "name": "host7",
                    "models": ["default"],
                    "roles": ["follow"],
                    "tokens": [token_hash(token)],
                }
            ]
        )
    )
    (folder / "authority.toml").chmod(0o600)
    (folder / "token").write_text(token + "\n")
    (folder / "token").chmod(0o600)
    port = free_port()
    admin = f"unix:{folder}/admin.sock"
    origin = FollowingServer(
        folder / "a",
        *("--listen", f"localhost:{port}", "--listen", f"{admin}?role=admin"),
        *("--authority", str(folder / "authority.toml")),
        *("--tls-cert", str(pair.certificate), "--tls-key", str(pair.key)),
    )
    follower = FollowingServer(
        folder / "b",
        *("--follow", f"grpcs://localhost:{port}", "--follow-ca", str(authority.ca)),
        *("--follow-token-file", str(folder / "token")),
    )
    process = origin.spawn()
    try:
        with Client(admin) as trainer:
            wait_serving(process, trainer, 60)
            pushed = trainer.get_version(trainer.push(checkpoint(2)).version)
            with follower.running() as client:
                until(lambda: staged(client, pushed), "the version is staged")
                assert _equal(client, pushed.version, checkpoint(2))
            (folder / "token").write_text(new_token())
            follower.kill()
            process = follower.spawn()
            until(lambda: "does not answer" in follower.log, "the token is refused")
            assert token not in follower.log
    finally:
        origin.kill()
        follower.kill()
