"""Probes of a version as its commit record keeps them: text of their compressed message."""

from __future__ import annotations

import base64
import logging
import zlib
from functools import lru_cache

from google.protobuf.message import DecodeError

from weightsync.v1 import weightsync_pb2 as pb

logger = logging.getLogger(__name__)

#: Bytes of the largest message.
MAX_BYTES = 512 << 10


def pack(probes: pb.Probes) -> str:
    """Return how many there are, a colon, and all of them."""
    data = zlib.compress(probes.SerializeToString(deterministic=True))
    return f"{len(probes.probes)}:{base64.b64encode(data).decode()}"


def count(text: str) -> int:
    """Return how many probes `pack` was given; of an empty text 0."""
    number = text.partition(":")[0]
    return int(number) if number.isdecimal() else 0


@lru_cache(maxsize=4)
def unpack(text: str) -> pb.Probes | None:
    """Return what `pack` was given; None: there are none, or they cannot be read.

    Nobody changes what is returned.
    """
    if not text:
        return None
    try:
        inflating = zlib.decompressobj()
        packed = base64.b64decode(text.partition(":")[2], validate=True)
        data = inflating.decompress(packed, MAX_BYTES + 1)
        if not inflating.eof or len(data) > MAX_BYTES:
            raise ValueError("they are cut off, or too large")
        return pb.Probes.FromString(data)
    except (ValueError, zlib.error, DecodeError) as error:
        logger.warning("probes of a version cannot be read, so that it has none: %s", error)
        return None
