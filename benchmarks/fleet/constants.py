"""Every number that the simulation takes for granted, with where it is from."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

__all__ = ["CONSTANTS", "Constants", "Row", "rows"]

_H200 = "measured on a host with an H200 and 16 cores"
_ETCD = "measured 2026-11-23, three etcd 3.4.23 on one disk"
_ASSUMED = "assumed, measured nowhere"


def _known(value: float, unit: str, source: str) -> Any:
    return field(default=value, metadata={"unit": unit, "source": source})


@dataclass(frozen=True)
class Constants:
    """The figures of one fleet; each field's metadata has its unit and its source."""

    nic_bytes_per_s: float = _known(12.5e9, "bytes/s", "a host's link of 100 Gb/s")
    stream_bytes_per_s: float = _known(
        1.7e9, "bytes/s", "one TCP stream costs a core of two; measured 2026-11-23 on loopback"
    )
    s3_gets_per_s: float = _known(
        5500, "GET/s", "S3's documentation: the least that one partitioned prefix serves"
    )
    s3_burst_s: float = _known(0.1, "s of that rate", _ASSUMED)
    s3_first_byte_s: float = _known(
        0.14, "s, median", "S3's documentation: 0.1 to 0.2 s for most requests"
    )
    own_store_bytes_per_s: float = _known(
        25e9, "bytes/s", "a store of one's own with two links of 100 Gb/s"
    )
    own_store_first_byte_s: float = _known(0.01, "s, median", _ASSUMED)
    origin_bytes_per_s: float = _known(
        0.85e9, "bytes/s", "`make bench-pullers`, 64 pulls of one server on 2 cores, clients too"
    )
    origin_first_byte_s: float = _known(
        0.0022, "s, median", "`make bench-control`, a call during a push"
    )
    first_byte_sigma: float = _known(
        0.35, "of a log-normal", f"p99 is 2.3 medians; {_ASSUMED}, but for S3's 0.1 to 0.2 s"
    )
    backoff_s: float = _known(0.1, "s", "the first pause after a 503; `object_client`")
    backoff_most_s: float = _known(
        5, "s", "the longest, where each is 0.1 s to twice the last; `object_client`"
    )
    range_bytes: float = _known(
        64 << 20, "bytes", "ranges of a read; the code has 16 MiB, a line of its own"
    )
    shard_bytes: float = _known(256 << 20, "bytes", "the client's default")
    delta_shard_bytes: float = _known(
        64 << 20, "bytes", "the client's shards of a delta take as much or more; `grouping`"
    )
    readers: float = _known(8, "objects", "that a follower reads at once; `stored_bytes`")
    reads_at_once: float = _known(8, "ranges", "of one object; `shard_transfer`")
    fetchers: float = _known(
        10, "fetchers", "the server's default on 16 cores; they patch and digest"
    )
    memcpy_bytes_per_s: float = _known(
        9.6e9, "bytes/s", f"one thread's copy, 4.5 to 6.6 GB/s on others of the kind; {_H200}"
    )
    patch_over_memcpy: float = _known(0.61, "of a copy", f"a patch of 1 %, all bytes; {_H200}")
    patches: float = _known(2, "patches", "with two slots: the last version's, then the new one's")
    digest_over_memcpy: float = _known(1.1, "of a copy", f"digests of all bytes; {_H200}")
    threads_gain: float = _known(
        0.83, "of n threads", f"two threads patch 1.66 times as fast as one; {_H200}"
    )
    prefetch_bytes_per_s: float = _known(
        23.9e9, "bytes/s", f"15.2 GB into device memory beside generation, 0.636 s; {_H200}"
    )
    prepare_s: float = _known(0.068, "s", f"preparing what is in device memory; {_H200}")
    stop_s: float = _known(0.0126, "s", f"until vLLM has stopped; {_H200}")
    switch_delta_s: float = _known(0.0084, "s", f"writing and comparing 1 %, and resuming; {_H200}")
    switch_full_s: float = _known(0.0195, "s", f"writing and comparing all, and resuming; {_H200}")
    host_sigma: float = _known(0.1, "of a log-normal", f"hosts differ in speed; {_ASSUMED}")
    slow_share: float = _known(0.01, "of all hosts", f"stragglers; {_ASSUMED}")
    slow_factor: float = _known(2, "times", f"as long as others; {_ASSUMED}")
    put_s: float = _known(0.0014, "s, median", f"a put or a create; {_ETCD}")
    put_sigma: float = _known(0.75, "of a log-normal", f"p99 is 8 ms; {_ETCD}")
    puts_per_s: float = _known(
        3300,
        "creates/s",
        "measured 2026-11-26 with `open_register` on 2 cores: 1,000 creates at once through three "
        "etcd on one host, until a watcher has seen all (0.20 to 0.30 s)",
    )
    watch_first_s: float = _known(0.002, "s", f"a watched key, first of 300 connections; {_ETCD}")
    watch_step_s: float = _known(
        1 / 30_000, "s", f"each further one, so that the last of 300 has it after 12 ms; {_ETCD}"
    )
    poll_s: float = _known(1, "s", "between two looks without a watch; `follow_interval_s`")
    jitter_full_s: float = _known(2, "s", "0 to so many before a whole version is read; not built")
    jitter_delta_s: float = _known(0, "s", "the same before a delta is read: retries spread them")
    lease_s: float = _known(10, "s", "a member that does not renew it is gone")
    lease_renewals: float = _known(3, "renewals", "in the time of a lease")


CONSTANTS = Constants()


class Row(NamedTuple):
    """One constant as a page shows it."""

    name: str
    value: float
    unit: str
    source: str


def rows() -> list[Row]:
    """Return all constants in the order of the class."""
    return [
        Row(one.name, float(getattr(CONSTANTS, one.name)), *_about(one.metadata))
        for one in fields(CONSTANTS)
    ]


def _about(metadata: Any) -> tuple[str, str]:
    return metadata["unit"], metadata["source"]
