"""Ranks of FSDP1 and ZeRO-3 push what they hold to a real server, and nobody gathers."""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file

from tests.matrix.flat_ranks import FSDP1, RANKS, ZERO3, run
from tests.support.ranks import run_ranks
from tests.support.server_fixtures import RETRY
from tests.support.weightsync_server import WeightSyncServer
from weightsync_client import Client, Reason

# Ranks need seconds of a processor that others may need as well.
pytestmark = pytest.mark.timeout(180)

zero3 = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)


class Ranks(NamedTuple):
    """What the ranks of a trainer wrote down, and the server that they pushed to."""

    server: WeightSyncServer
    folder: Path
    results: list[dict[str, Any]]


@pytest.fixture(scope="module")
def flat_server() -> Iterator[WeightSyncServer]:
    folder = Path(tempfile.mkdtemp(prefix="wsf"))
    server = WeightSyncServer(folder / "run", folder / "state", flags=("--same-host",))
    server.start()
    with Client(server.address, retry=RETRY) as client:
        for holder in ("before", "now"):
            client.acquire_epoch(holder)
    yield server
    server.stop()
    shutil.rmtree(folder, ignore_errors=True)


def ranks_of(kind: str, server: WeightSyncServer) -> Iterator[Ranks]:
    folder = Path(tempfile.mkdtemp(prefix="wsr"))
    run_ranks(run, RANKS, kind, str(folder), server.address)
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    yield Ranks(server, folder, found)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def fsdp1_ranks(flat_server: WeightSyncServer) -> Iterator[Ranks]:
    yield from ranks_of("fsdp1", flat_server)


@pytest.fixture(scope="module")
def zero3_ranks(flat_server: WeightSyncServer) -> Iterator[Ranks]:
    yield from ranks_of("zero3", flat_server)


@pytest.fixture(params=["fsdp1", pytest.param("zero3", marks=zero3)])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    found: Ranks = request.getfixturevalue(f"{request.param}_ranks")
    return found


def check_form(ranks: Ranks, form: str, gathered: str) -> None:
    """Assert that all ranks made one version, of what the library itself gathers."""
    state = load_file(ranks.folder / f"{gathered}.safetensors")
    (version,) = {tuple(rank[form][:2]) for rank in ranks.results}
    with Client(ranks.server.address, retry=RETRY) as client:
        whole = client.push(state, delta="never")
    assert version[1] == whole.content_digest
    # Each byte comes from one rank.
    size = sum(tensor.nbytes for tensor in state.values())
    assert sum(rank[form][2] for rank in ranks.results) == size


@pytest.mark.parametrize("form", FSDP1)
def test_fsdp1(fsdp1_ranks: Ranks, form: str) -> None:
    check_form(fsdp1_ranks, form, form)


@zero3
@pytest.mark.parametrize("form", ZERO3)
def test_zero3(zero3_ranks: Ranks, form: str) -> None:
    check_form(zero3_ranks, form, form)


def last_form(ranks: Ranks) -> str:
    """Return the name of the model that is pushed in other ways too."""
    return list(FSDP1 if "one_unit" in ranks.results[0] else ZERO3)[-1]


def test_no_rank_needs_another_but_at_the_server(ranks: Ranks) -> None:
    check_form(ranks, "without_group", last_form(ranks))


def test_what_did_not_change_is_not_sent(ranks: Ranks) -> None:
    check_form(ranks, "copied", last_form(ranks))
    first, again = ([rank[form] for rank in ranks.results] for form in ("copied", "unchanged"))
    assert {rank[1] for rank in first} == {rank[1] for rank in again}
    assert sum(rank[2] for rank in again) < sum(rank[2] for rank in first) / 2


def test_what_the_server_refuses_every_rank_is_told(ranks: Ranks) -> None:
    reasons = {rank["old_epoch"][0] for rank in ranks.results}
    assert reasons == {Reason.EPOCH_STALE}


def test_a_buffer_that_differs_is_told_to_every_rank(ranks: Ranks) -> None:
    for reason, message in (rank["differing"] for rank in ranks.results):
        assert reason == Reason.DIGEST_MISMATCH
        assert "writers 0 and 1" in message
        assert "scale" in message
