"""Pushes of some tensors to a real server: the others stay what they are in the base."""

from __future__ import annotations

import pytest
import torch

from tests.main.test_deltas import check, model
from tests.support.server_fixtures import RETRY, Relay, every_kind
from tests.support.trained import Tensors, step
from tests.support.weightsync_server import WeightSyncServer
from weightsync_client import Client, InvalidError, NotFoundError, PushKind, Reason

# Six modules may share two cores, with other work beside.
pytestmark = pytest.mark.timeout(180)


def _some(tensors: Tensors, *numbers: int) -> Tensors:
    return {f"layers.{number}.weight": tensors[f"layers.{number}.weight"] for number in numbers}


def _fresh(server: WeightSyncServer) -> Client:
    """A client that has pushed nothing, as after a restart of the trainer."""
    return Client(server.address, model="default", retry=RETRY)


@every_kind
def test_what_is_absent_stays(client: Client, server: WeightSyncServer) -> None:
    tensors = model()
    first = client.push(tensors, delta="never")
    step(some := _some(tensors, 1, 4), 1)
    with _fresh(server) as other:
        # One that did not change is not sent.
        pushed = other.push(some | _some(tensors, 2), partial=True, base=first.version)
        assert (pushed.kind, pushed.base_version) == (PushKind.DELTA, first.version)
        assert pushed.sent_bytes == pytest.approx(4 * 700_000, rel=0.01)
        assert pushed.dense_bytes == first.size_bytes
        check(other, pushed.version, tensors)
        # The digest is of the whole: a push of all of it has the same.
        whole = other.push(tensors, delta="never")
        assert whole.content_digest == pushed.content_digest


def test_the_base_is_what_this_client_committed_last(
    client: Client, server: WeightSyncServer
) -> None:
    tensors = model()
    first = client.push(tensors)
    with _fresh(server) as other:
        # Newer, and not this client's.
        other.push(model(seed=5), delta="never")
    for number in range(3):
        step(some := _some(tensors, number), number)
        pushed = client.push(some, partial=True)
        assert pushed.base_version == (pushed.version - 1 if number else first.version)
        # This client has a copy of it.
        assert pushed.sent_bytes < 0.05 * 2 * 700_000
        check(client, pushed.version, tensors)
    # What was made so is the base of a delta.
    step(tensors, 7)
    whole = client.push(tensors)
    assert (whole.kind, whole.base_version) == (PushKind.DELTA, pushed.version)
    check(client, whole.version, tensors)


@every_kind
def test_a_delta_follows_a_part_without_a_copy(client: Client) -> None:
    tensors = model()
    client.push(tensors, delta="never")
    for number in range(2):
        step(some := _some(tensors, 3), number)
        pushed = client.push(some, partial=True, delta="never")
        assert pushed.sent_bytes == pytest.approx(2 * 700_000, rel=0.01)
        check(client, pushed.version, tensors)


def test_an_iterable_gives_some(client: Client) -> None:
    tensors = model()
    client.push(tensors, delta="never")
    step(some := _some(tensors, 0, 5), 1)
    pushed = client.push(iter(some.items()), partial=True)
    check(client, pushed.version, tensors)
    nothing = client.push(_some(tensors, 5), partial=True)
    assert nothing.content_digest == pushed.content_digest
    assert nothing.sent_bytes < 2000


@pytest.mark.parametrize(
    ("name", "tensor", "kept"),
    [
        ("layers.9.weight", torch.zeros(2), "it is not at all"),
        ("layers.1.weight", torch.zeros(700_001), r"it is BF16 \[700001\]"),
        ("layers.1.weight", torch.zeros(3).bfloat16(), r"it is BF16 \[700001\]"),
    ],
)
def test_what_the_base_has_not_is_refused(
    client: Client, server: WeightSyncServer, name: str, tensor: torch.Tensor, kept: str
) -> None:
    tensors = model()
    first = client.push(tensors, delta="never")
    with _fresh(server) as other:
        for one in (client, other):
            with pytest.raises(InvalidError, match=f"{name}.*{kept}; leave it out") as refused:
                one.push({name: tensor}, partial=True, base=first.version)
            assert refused.value.reason is Reason.LAYOUT_INVALID
    assert client.versions()[0].version == first.version
    assert not client.status().models[0].pushes


def test_a_base_that_is_not_there_is_named(client: Client) -> None:
    some = _some(model(), 1)
    with pytest.raises(NotFoundError, match=r"keeps the tensors of a live version, which .* base="):
        client.push(some, partial=True)
    with pytest.raises(NotFoundError, match="keeps the tensors of version 800, which"):
        client.push(some, partial=True, base=800)
    with pytest.raises(InvalidError, match="base=8 is given, but partial=True is not"):
        client.push(some, base=8)


def test_a_cut_part_is_taken_up(relay: Relay, server: WeightSyncServer) -> None:
    tensors = model()
    with _fresh(server) as direct:
        first = direct.push(tensors, delta="never")
    with Client(relay.address, model="default", retry=RETRY) as client:
        step(some := _some(tensors, 0, 1, 2), 1)
        relay.cut_after = [relay._passed + 500_000, relay._passed + 2_000_000]
        pushed = client.push(some, partial=True, base=first.version, chunk_bytes=1 << 16)
        assert relay.cuts == 2
    with _fresh(server) as direct:
        check(direct, pushed.version, tensors)


def test_a_part_outlives_its_server(file_server: WeightSyncServer) -> None:
    tensors = model()
    with Client(file_server.address, model="default", retry=RETRY) as client:
        client.push(tensors, delta="never")
        step(some := _some(tensors, 2), 1)
        pushed = client.push(some, partial=True)
        file_server.kill()
        file_server.start()
        check(client, pushed.version, tensors)
        step(some := _some(tensors, 4), 2)
        check(client, client.push(some, partial=True).version, tensors)


def test_another_base_than_the_last_one_is_kept(client: Client) -> None:
    tensors = model()
    first = client.push(tensors)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    step(tensors, 1)
    client.push(tensors)
    step(some := _some(before, 3), 2)
    pushed = client.push(some, partial=True, base=first.version)
    assert pushed.base_version == first.version
    check(client, pushed.version, before)
