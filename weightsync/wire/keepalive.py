"""How each end of a connection notices that the other one is gone: dead, frozen or cut off."""

from __future__ import annotations

__all__ = ["CLIENT_KEEPALIVE", "SERVER_KEEPALIVE", "keepalive"]


def keepalive(silence_s: int, answer_s: int) -> list[tuple[str, int]]:
    """Return gRPC's options by which a peer is gone that is silent for both times together.

    Args:
        silence_s: Seconds without a byte after which it is pinged.
        answer_s: Seconds that it may take to answer. On a slow link a ping waits behind what was
            sent before it.
    """
    return [
        ("grpc.keepalive_time_ms", 1000 * silence_s),
        ("grpc.keepalive_timeout_ms", 1000 * answer_s),
        # This one ends a connection whose peer is frozen: a minute, whatever the others say.
        ("grpc.http2.ping_timeout_ms", 1000 * answer_s),
    ]


#: Of whoever calls a server: gone after 25 s. Four megabytes that the kernel may have queued go out
#: before an answer comes at 280 kB/s or more.
CLIENT_KEEPALIVE = [*keepalive(10, 15), ("grpc.http2.max_pings_without_data", 0)]

#: Of a server: gone after 8 s, also where no call is under way. Nobody is hung up on for pinging
#: often: where a write is under way, gRPC copies all that it noted of the pings before with every
#: further one, so that those which the kernel had queued took a core for a minute. Answers cost as
#: little as the pings, and while 10,000 of them wait for their reader, gRPC reads no more from it.
SERVER_KEEPALIVE = [
    *keepalive(4, 4),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
]
