"""How keys of an object store are made, and taken apart."""

from __future__ import annotations

import re
from typing import NamedTuple

from weightsync.model.manifest import MAX_VERSION

SCHEMES = ("s3", "gs", "az")

MARKER = "weightsync-store.json"

_RECORD = re.compile(r"([1-9][0-9]{0,15})/(0|[1-9][0-9]{0,17})\.json")
_NUMBER = re.compile(r"(0|[1-9][0-9]{0,17})\.json")
_SHARD = re.compile(r"([0-9a-f]{32})-(0|[1-9][0-9]{0,15})")


class RecordName(NamedTuple):
    version: int
    epoch: int

    @property
    def path(self) -> str:
        return f"{self.version}/{self.epoch}.json"


class ShardName(NamedTuple):
    """Names bytes by their hexadecimal xxh3-128 and their number."""

    digest: str
    size: int

    def __str__(self) -> str:
        return f"{self.digest}-{self.size}"

    @classmethod
    def parse(cls, text: str) -> ShardName:
        match = _SHARD.fullmatch(text)
        if match is None:
            raise ValueError(f"{text[:60]!r} is not a name of a shard")
        return cls(match[1], int(match[2]))


def record_name(path: str) -> RecordName | None:
    match = _RECORD.fullmatch(path)
    if match is None or int(match[1]) > MAX_VERSION:
        return None
    return RecordName(int(match[1]), int(match[2]))


def numbered(path: str) -> int | None:
    match = _NUMBER.fullmatch(path.rpartition("/")[2])
    return int(match[1]) if match else None


def shard_key(model: str, name: ShardName | str) -> str:
    return f"{model}/shards/{name}"


def is_location(place: str) -> bool:
    """Tell whether a place that a store gave for a shard is in an object store, and no path."""
    return place.partition("://")[0] in SCHEMES


def is_receipt(place: str) -> bool:
    """Tell whether a place in an object store is that of a receipt, and not of a shard's bytes."""
    # Before the last slash of a receipt's place there is the number of its version.
    return is_location(place) and place.rsplit("/", 2)[1] != "shards"


def object_of(receipt: str, name: ShardName | str) -> str:
    """Return where a shard's bytes go.

    `receipt` is `<url>/<model>/pushes/<server>/<version>/<shard>`.
    """
    root = receipt.rsplit("/", 4)[0]
    return f"{root}/shards/{name}"
