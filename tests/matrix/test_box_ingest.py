"""Processes that push one version together, by way of ingest processes."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.matrix.test_box_deltas import (
    WRITERS,
    Writers,
    changed,
    compare,
    kinds,
    matrix,
)
from tests.support.weightsync_server import WeightSyncServer
from weightsync import failpoints
from weightsync_client import PushKind, TransferPath


class Site:
    """A server with two ingest processes and failpoints."""

    def __init__(self, folder: Path) -> None:
        self.plan = folder / "plan"
        self.plan.touch()
        self.hits = folder / "plan.hits"
        self.server = WeightSyncServer(
            folder / "run",
            folder / "state",
            flags=("--slots", "3"),
            variables={failpoints.VARIABLE: f"@{self.plan}"},
            ingest=2,
        )


@pytest.fixture(name="site")
def _site() -> Iterator[Site]:
    folder = Path(tempfile.mkdtemp(prefix="wsi"))
    site = Site(folder)
    site.server.start()
    yield site
    site.server.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("along", [0, 1])
def test_ingest_processes_write_boxes_and_what_changed_in_them(site: Site, along: int) -> None:
    site.plan.write_text("ingest.chunk=sleep(0)")
    made = Writers([site.server.address] * WRITERS)
    with made.stack:
        before = matrix(60 + along)
        first = made.push(before, "first", along, chunk_bytes=50_000)
        by_ingest = site.hits.read_text().count("ingest.chunk")
        assert by_ingest > 2 * WRITERS, "in several chunks each"
        after = changed(before, 62)
        second = made.push(after, "second", along, chunk_bytes=500)
        assert site.hits.read_text().count("ingest.chunk") > by_ingest
    assert kinds(first) == [PushKind.FULL] * WRITERS
    assert kinds(second) == [PushKind.DELTA] * WRITERS
    assert {result.way for result in first + second} == {TransferPath.STREAM}
    compare(site.server, after, second)


@pytest.mark.parametrize("point", ["ingest.chunk", "ingest.copied"])
def test_one_that_dies_in_the_midst_of_boxes_is_gone_on_without(site: Site, point: str) -> None:
    made = Writers([site.server.address] * WRITERS)
    whole = matrix(63)
    with made.stack, ThreadPoolExecutor(1) as pool:
        site.plan.write_text(f"{point}=2>panic")
        pushing = pool.submit(made.push, whole, "dies", 1, chunk_bytes=20_000)
        while not site.hits.exists() and not pushing.done():
            time.sleep(0.01)
        site.plan.unlink()
        results = pushing.result()
    assert f"{point} panic" in site.hits.read_text()
    compare(site.server, whole, results)
