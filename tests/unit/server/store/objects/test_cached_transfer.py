"""What comes through a cache that anybody may write to is what was put, or comes from the store."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from tests.support.shard_cache import UnaskedCache, unasked_cache
from tests.support.xxh3_forgery import BLOCK, forge_block
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.digest import tensor_digest
from weightsync_server.store.objects import shard_transfer
from weightsync_server.store.objects.object_keys import object_of
from weightsync_server.store.objects.piece_digests import CacheOutcome, PieceDigests
from weightsync_server.store.objects.shard_transfer import download_cached, receipt_at, upload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.object_servers import ObjectServer

PIECE = 4 * BLOCK
DATA = os.urandom(5 * PIECE - 1)


@pytest.fixture
def cache(s3: ObjectServer) -> Iterator[UnaskedCache]:
    with unasked_cache(s3.port) as made:
        yield made


@pytest.fixture
def stored(bucket: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, PieceDigests]:
    """Return the place of a shard of five pieces, and their digests."""
    monkeypatch.setattr(shard_transfer, "PIECE_BYTES", PIECE)
    place = f"{bucket}/m/pushes/a/1/0"
    upload(memoryview(DATA), place, lambda: None)
    receipt = receipt_at(place)
    assert receipt.pieces is not None
    return object_of(place, receipt.object), receipt.pieces


def fetched(url: str, stored: tuple[str, PieceDigests]) -> CacheOutcome:
    """Fetch the shard; whatever the cache does, it is the one that was put."""
    place, pieces = stored
    view = bytearray(len(DATA))
    outcome = download_cached(place, url, pieces, memoryview(view), lambda: None)
    assert view == DATA
    assert sum(outcome[:3]) == 5
    return outcome


def changed(data: bytes, piece: int) -> bytes:
    """Return a shard of which a piece has other bytes with the same XXH3."""
    at = piece * PIECE
    block = forge_block(data[at : at + BLOCK], b"\x80\x3f" * 300)
    return data[:at] + block + data[at + BLOCK :]


def test_a_cache_that_has_it_is_enough(
    cache: UnaskedCache, stored: tuple[str, PieceDigests]
) -> None:
    assert fetched(cache.url(stored[0]), stored) == CacheOutcome(5, 0, 0)


@pytest.mark.parametrize("piece", [0, 2, 4])
def test_other_bytes_with_the_same_xxh3_are_found_in_any_piece(
    cache: UnaskedCache, stored: tuple[str, PieceDigests], piece: int
) -> None:
    forged = changed(DATA, piece)
    at = piece * PIECE
    assert forged != DATA
    assert tensor_digest(forged[at : at + PIECE]) == tensor_digest(DATA[at : at + PIECE])
    cache.change = lambda _: forged
    outcome = fetched(cache.url(stored[0]), stored)
    assert outcome.wrong == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda _: None,
        lambda data: data[: PIECE // 2],
        lambda data: data + data,
        lambda data: bytes(len(data)),
    ],
    ids=["missing", "short", "long", "zeros"],
)
def test_what_a_cache_lacks_comes_from_the_store(
    cache: UnaskedCache, stored: tuple[str, PieceDigests], change: Callable[[bytes], bytes | None]
) -> None:
    cache.change = change
    fetched(cache.url(stored[0]), stored)


def test_a_cache_that_sends_without_end_is_cut_off(
    cache: UnaskedCache, stored: tuple[str, PieceDigests]
) -> None:
    cache.endless = True
    outcome = fetched(cache.url(stored[0]), stored)
    assert (outcome.right, outcome.wrong) == (0, 0)


def test_a_cache_that_is_away_is_asked_no_more(stored: tuple[str, PieceDigests]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/m/shards/x"
        assert fetched(url, stored) == CacheOutcome(0, 0, 5, away=True)


def test_a_cache_that_lacks_a_shard_is_there(
    cache: UnaskedCache, stored: tuple[str, PieceDigests]
) -> None:
    cache.change = lambda _: None
    assert fetched(cache.url(stored[0]), stored) == CacheOutcome(0, 0, 5)


def test_digests_that_leave_out_a_piece_prove_nothing(
    cache: UnaskedCache, stored: tuple[str, PieceDigests]
) -> None:
    place, pieces = stored
    fewer = PieceDigests(pieces.piece_bytes, pieces.digests[:-32])
    view = memoryview(bytearray(len(DATA)))
    with pytest.raises(WeightSyncError, match="do not cover it") as caught:
        download_cached(place, cache.url(place), fewer, view, lambda: None)
    assert caught.value.reason is Reason.DATA_CORRUPT
    assert not cache.asked
