"""A fleet of real servers on this machine: bytes to every host, decisions, and a late joiner."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.durable import write_shards
from benchmarks.fleet.decisions import decisions
from benchmarks.fleet.figures import percentile
from benchmarks.fleet.late_joiner import fleet_flags, late_joiner
from benchmarks.fleet.link_probe import link_seconds
from benchmarks.fleet.linked_servers import make_trust
from benchmarks.fleet.pushing_trainer import pushing_trainer, save_model
from benchmarks.fleet.shaped_links import GATEWAY, LinkedHost, shaped_links
from benchmarks.fleet.transfers import Samples, Site, Way, following, one_by_one, rounds_of
from benchmarks.report import short
from benchmarks.source import Source
from tests.support.etcd import Etcd
from tests.support.object_servers import moto

__all__ = ["Measure", "measured"]

_TRAINER, _LATE = "trainer", "late"
_ETCD_NODES = 3
_WANTED_RATIO, _WANTED_SENT, _WANTED_DECISION_S = 0.5, 1.05, 0.1


class Measure(NamedTuple):
    """How much is measured.

    Attributes:
        hosts: Followers and members.
        size: Bytes of the model whose bytes are moved.
        rounds: Of each way that bytes take.
        link_bytes_per_s: Of every link, each way.
        decisions: Of the fleet that moves no bytes.
    """

    hosts: int
    size: int
    rounds: int
    link_bytes_per_s: int
    decisions: int


def measured(measure: Measure) -> tuple[Samples, dict[str, Any]]:
    """Return samples and facts.

    Raises:
        SystemExit: This machine cannot, in one sentence.
    """
    with tempfile.TemporaryDirectory(prefix="ws-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        names = [f"host{number}" for number in range(1, measure.hosts + 1)]
        every = [_TRAINER, _LATE, *names]
        hosts = stack.enter_context(shaped_links(folder, every, measure.link_bytes_per_s))
        samples = _decisions(folder / "decisions", measure)
        with _etcd(_LinkedEtcd, folder / "etcd") as etcd:
            samples |= _transfers(folder, hosts, names, measure, etcd.url("transfers"))
    return samples, _facts(samples)


def _decisions(folder: Path, measure: Measure) -> Samples:
    folder.mkdir()
    with _etcd(Etcd, folder / "etcd") as etcd:
        return decisions(folder, etcd, measure.hosts, measure.decisions)


def _transfers(
    folder: Path, hosts: dict[str, LinkedHost], names: list[str], measure: Measure, register: str
) -> Samples:
    trust, model = make_trust(folder, list(hosts)), folder / "model.safetensors"
    save_model(model, measure.size)
    source, rounds = hosts[_TRAINER], measure.rounds
    with contextlib.ExitStack() as stack:
        trainer = stack.enter_context(pushing_trainer(source, folder, trust, measure.size))
        store = stack.enter_context(moto(folder, host=GATEWAY))
        receivers = {name: hosts[name] for name in names}
        site = Site(
            folder, source, receivers, trust, trainer, model, store.url, store.environment()
        )
        first = receivers[names[0]]
        samples: Samples = {
            "link_s": [link_seconds(source, first, measure.size) for _ in range(rounds)],
            "disk_s": [_disk_seconds(folder, measure.size) for _ in range(rounds)],
        }
        samples |= one_by_one(site, rounds)
        for way in Way:
            flags = fleet_flags(register) if way is Way.S3 else ()
            with following(site, way, *flags) as running:
                samples |= rounds_of(site, running, rounds)
                if way is Way.S3:
                    samples |= late_joiner(site, running, hosts[_LATE], register, rounds)
    for way in Way:
        samples[f"over_one_by_one_{way}"] = [
            ours / turns
            for ours, turns in zip(
                samples[f"push_to_staged_everywhere_s_{way}"], samples["one_by_one_s"], strict=True
            )
        ]
    return samples


def _disk_seconds(folder: Path, size: int) -> float:
    """Return how long one process takes to write so many bytes and to flush them."""
    source = Source(size, 1)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        begun = time.monotonic()
        write_shards(source, Path(name))
        return time.monotonic() - begun


def _facts(samples: Samples) -> dict[str, Any]:
    return {
        "decision_p99_s": short(percentile(samples["decision_s"], 0.99)),
        "create_to_read_p99_s": short(percentile(samples["create_to_read_s"], 0.99)),
        "skew_p99_s": short(percentile(samples["skew_s"], 0.99)),
        "wanted_at_most": {
            "over_one_by_one_file": _WANTED_RATIO,
            "over_one_by_one_s3": _WANTED_RATIO,
            "origin_sent_file": _WANTED_SENT,
            "origin_sent_s3": _WANTED_SENT,
            "decision_p99_s": _WANTED_DECISION_S,
        },
    }


class _LinkedEtcd(Etcd):
    """Listens where hosts on links reach it."""

    def address(self, port: int) -> str:
        return f"{GATEWAY}:{port}"

    def _url(self, port: int) -> str:
        return f"http://{self.address(port)}"


@contextlib.contextmanager
def _etcd(kind: type[Etcd], folder: Path) -> Iterator[Etcd]:
    program = shutil.which("etcd")
    if program is None:
        raise SystemExit("--hosts needs etcd: install the Debian package etcd-server")
    folder.mkdir()
    cluster = kind(program, folder, _ETCD_NODES)
    try:
        yield cluster
    finally:
        cluster.close()
