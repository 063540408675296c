"""What transports did, added up."""

from __future__ import annotations

from weightsync_client import Streamed, TransferPath
from weightsync_client.transport.protocol import Sent, ShardDigests


def _sent(
    *shards: int, way: TransferPath = TransferPath.SAME_HOST, by_server: bool = False
) -> Sent:
    done = {index: ShardDigests((), []) for index in shards}
    return Sent(done, way=way, by_server=by_server)


def test_shards_of_all_transports_are_there_and_the_fastest_way_counts() -> None:
    both = Sent().plus(_sent(0, 2)).plus(_sent(1, way=TransferPath.STREAM))
    assert (list(both.shards), both.way) == ([0, 2, 1], TransferPath.SAME_HOST)
    alone = Sent().plus(Sent(reason=Streamed.NOT_OFFERED)).plus(_sent(1, way=TransferPath.STREAM))
    assert (list(alone.shards), alone.way, alone.reason) == (
        [1],
        TransferPath.STREAM,
        Streamed.NOT_OFFERED,
    )


def test_the_server_copied_all_only_if_nothing_went_otherwise() -> None:
    copied = Sent().plus(_sent(0, by_server=True))
    assert copied.by_server
    assert not copied.plus(_sent(1, way=TransferPath.STREAM)).by_server
    assert not _sent(1, way=TransferPath.STREAM).plus(copied).by_server
    assert not Sent().by_server
