"""How bytes come to every host: pushed to each in turn, or pushed once and followed."""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.fleet.arrivals import arrivals
from benchmarks.fleet.linked_servers import Trust, linked_server, own_address, tcp_address
from benchmarks.fleet.pushing_trainer import PushingTrainer
from benchmarks.fleet.shaped_links import LinkedHost
from weightsync_client import Client

__all__ = ["Running", "Samples", "Site", "Way", "follower", "following", "one_by_one", "rounds_of"]

#: More than any round takes where a link carries a twentieth of its rate.
_ROUND_S = 300.0
_FETCHERS = ("--fetchers", "1")
Samples = dict[str, list[float]]


class Way(enum.StrEnum):
    """What carries the bytes to followers."""

    FILE = "file"
    S3 = "s3"
    GRPC = "grpc"


@dataclass(frozen=True)
class Site:
    """Where it happens.

    Attributes:
        folder: For everything; a short path, because unix sockets allow 107 bytes.
        source: The host of the trainer, and of the origin where there is one.
        hosts: Those that are to have every version.
        trust: Of all servers.
        trainer: On `source`.
        model: A checkpoint of the same layout, on which every engine starts.
        bucket: URL of the object store's bucket.
        environment: What clients of the object store need to know.
    """

    folder: Path
    source: LinkedHost
    hosts: Mapping[str, LinkedHost]
    trust: Trust
    trainer: PushingTrainer
    model: Path
    bucket: str
    environment: Mapping[str, str] = field(default_factory=dict)

    def engine(self) -> tuple[str, ...]:
        """Return the flags of a server with an engine."""
        return ("--model", str(self.model), "--no-same-host", *_FETCHERS)


def one_by_one(site: Site, rounds: int) -> Samples:
    """Have the trainer push to each host in turn, over its link."""
    samples: Samples = {}
    folders = {name: site.folder / f"p-{name}" for name in site.hosts}
    with contextlib.ExitStack() as stack:
        for name, host in site.hosts.items():
            server = linked_server(host, folders[name], site.trust, *site.engine())
            stack.enter_context(server)
        addresses = [tcp_address(host) for host in site.hosts.values()]
        for number in range(rounds + 1):
            busy = _Cores()
            pushed = site.trainer.push(addresses)
            if number:
                _add(samples, one_by_one_s=pushed.seconds, cores_one_by_one=busy.used())
    return samples


class Running(NamedTuple):
    """An origin and its followers.

    Attributes:
        way: What carries the bytes.
        folders: Of each server, by the name of its host.
        origin_pid: Process of the origin.
    """

    way: Way
    folders: Mapping[str, Path]
    origin_pid: int

    def sent_bytes(self, source: LinkedHost) -> int:
        """Return what has left the origin so far: by its link, or into the shared file system."""
        if self.way is not Way.FILE:
            return source.sent_bytes()
        origin = psutil.Process(self.origin_pid)
        everything = (origin, *origin.children(recursive=True))
        return sum(one.io_counters().write_chars for one in everything)


@contextlib.contextmanager
def following(site: Site, way: Way, *flags: str) -> Iterator[Running]:
    """Run an origin beside the trainer and a follower on each host.

    Args:
        site: Where.
        way: What carries the bytes.
        *flags: More flags of the followers; `{name}` in one is the host's.
    """
    folders = {name: site.folder / f"{way}-{name}" for name in (*site.hosts, site.source.name)}
    origin = folders[site.source.name]
    with contextlib.ExitStack() as stack:
        server = linked_server(
            site.source,
            origin,
            site.trust,
            *_FETCHERS,
            engine="none",
            store=_store(site, way),
            environment=site.environment,
        )
        running = Running(way, folders, stack.enter_context(server).pid)
        for name, host in site.hosts.items():
            stack.enter_context(follower(site, way, host, folders[name], *flags))
        yield running


@contextlib.contextmanager
def follower(site: Site, way: Way, host: LinkedHost, folder: Path, *flags: str) -> Iterator[None]:
    """Run one until the block ends; it answers when the block begins."""
    origin = site.folder / f"{way}-{site.source.name}"
    follow = {
        Way.FILE: ("--follow", f"file://{origin}/state/store"),
        Way.S3: ("--follow", _store(site, way)),
        Way.GRPC: (
            *("--follow", f"grpcs://{tcp_address(site.source)}"),
            *("--follow-ca", str(site.trust.authority)),
            *("--follow-token-file", str(site.trust.token_file)),
        ),
    }[way]
    given = [flag.replace("{name}", host.name) for flag in flags]
    everything = (*site.engine(), *follow, *given)
    with linked_server(host, folder, site.trust, *everything, environment=site.environment):
        yield


def rounds_of(site: Site, running: Running, rounds: int) -> Samples:
    """Push once in each round, and wait until every follower has it staged.

    Args:
        site: Where.
        running: From `following`.
        rounds: Those that count; one comes before.
    """
    samples: Samples = {}
    origin = own_address(running.folders[site.source.name])
    watched = {name: own_address(running.folders[name]) for name in site.hosts}
    with arrivals(watched) as staged, Client(origin) as client:
        for number in range(rounds + 1):
            busy, sent = _Cores(), running.sent_bytes(site.source)
            pushed = site.trainer.push([origin])
            version = pushed.versions[0]
            seconds = staged.everywhere(version, _ROUND_S) - pushed.begun
            sent = running.sent_bytes(site.source) - sent
            stored = client.get_version(version).stored_bytes
            if number:
                _add(
                    samples,
                    push_to_staged_everywhere_s=seconds,
                    push_s=pushed.seconds,
                    origin_sent=sent / stored,
                    cores=busy.used(),
                )
    return {f"{name}_{running.way}": values for name, values in samples.items()}


def _store(site: Site, way: Way) -> str:
    # With a store of its own the origin keeps versions in a folder.
    return {Way.FILE: "", Way.S3: f"{site.bucket}/bench", Way.GRPC: "memory://"}[way]


def _add(samples: Samples, **values: float) -> None:
    for name, value in values.items():
        samples.setdefault(name, []).append(value)


class _Cores:
    """How many cores all processes of this benchmark have kept busy since it was made."""

    def __init__(self) -> None:
        self._begun, self._before = time.monotonic(), self._seconds()

    def used(self) -> float:
        return (self._seconds() - self._before) / (time.monotonic() - self._begun)

    def _seconds(self) -> float:
        total = 0.0
        own = psutil.Process()
        for one in (own, *own.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                spent = one.cpu_times()
                total += spent.user + spent.system
        return total
