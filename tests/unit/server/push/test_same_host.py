"""Who gets an offer, and how long it is good."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.server.world import World, begin, simple
from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.same_host import PeerCredentials
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.push.sources.same_host import OFFER_S, SameHostOffers, is_here
from weightsync_server.workers.fetch.gpu_copy import GpuFetchPool

HERE = "unix:"
PEER = PeerCredentials(1, 2)


async def offered(
    offers: SameHostOffers, here: World, peer: str = HERE, who: str = "", **fields: object
) -> pb.SameHostOffer:
    response = await here.pushes.begin(begin(same_host=pb.SameHostSource(), **fields), 10, who)
    offers.offer(response, peer, who=who)
    return response.same_host_offer


@pytest.mark.parametrize(
    ("peer", "here"),
    [
        ("unix:", True),
        ("unix:/run/a.sock", True),
        ("ipv4:127.0.0.1:40258", True),
        ("ipv6:%5B::1%5D:40258", True),
        ("ipv4:10.0.3.7:40258", False),
        ("ipv6:%5Bfe80::1%5D:40258", False),
        ("vsock:2:1", False),
        ("", False),
    ],
)
def test_only_peers_on_this_host_are_here(peer: str, here: bool) -> None:
    assert is_here(peer) is here


async def test_an_offer_opens_its_push_once(here: World, tmp_path: Path) -> None:
    offers = SameHostOffers(here.pushes, tmp_path / "t.sock", GpuFetchPool())
    offer = await offered(offers, here)
    assert offer.socket == str(tmp_path / "t.sock")
    assert len(offer.secret) > 40
    push, writer = offers.redeem(offer.secret, PEER)
    assert writer == 0
    assert push.state.record.version == 1
    with pytest.raises(WeightSyncError) as told:
        offers.redeem(offer.secret, PEER)
    assert told.value.reason is Reason.PERMISSION_DENIED


async def test_an_offer_ends_with_time_with_the_next_and_with_its_push(
    here: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offers = SameHostOffers(here.pushes, tmp_path / "t.sock", GpuFetchPool())
    first = await offered(offers, here, idempotency_key="k")
    second = await offered(offers, here, idempotency_key="k")
    with pytest.raises(WeightSyncError, match="opens no push"):
        offers.redeem(first.secret, PEER)
    now = clock.monotonic()
    with monkeypatch.context() as later:
        later.setattr(clock, "monotonic", lambda: now + OFFER_S + 1)
        with pytest.raises(WeightSyncError, match="too old"):
            offers.redeem(second.secret, PEER)
    response = await here.pushes.begin(begin(same_host=pb.SameHostSource()), 10)
    offers.offer(response, HERE)
    await here.pushes.abort(pb.AbortPushRequest(push_id=response.push_id))
    with pytest.raises(WeightSyncError) as told:
        offers.redeem(response.same_host_offer.secret, PEER)
    assert told.value.reason is Reason.PUSH_ABORTED


async def test_nobody_else_gets_one(here: World, tmp_path: Path) -> None:
    offers = SameHostOffers(here.pushes, tmp_path / "t.sock", GpuFetchPool())
    await here.push(simple(1), idempotency_key="done")
    assert not (await offered(offers, here, idempotency_key="done")).secret
    assert not (await offered(offers, here, "ipv4:10.0.3.7:1", idempotency_key="mine")).secret
    await offered(offers, here, idempotency_key="mine")
    assert not (await offered(offers, here, who="somebody else", idempotency_key="mine")).secret
