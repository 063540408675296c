"""What a trainer computes goes to a real server: probes with a push, gaps of log probabilities."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.scraped import scraped
from tests.support.weightsync_server import WeightSyncServer, short_server
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import Client, InvalidError, Probes, PushKind, PushResult, TransferPath
from weightsync_client.rpc import calls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROBES = Probes([[1, 2, 3], [4, 5]], [[-0.5, -1.5], [-2.5]])


@pytest.fixture(scope="module")
def server() -> Iterator[WeightSyncServer]:
    with short_server(store="memory://", flags=("--metrics", "127.0.0.1:0", "--same-host")) as one:
        yield one


@pytest.fixture
def client(server: WeightSyncServer) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> list[pb.CommitPushRequest]:
    """Every commit that goes out."""
    found: list[pb.CommitPushRequest] = []
    real: Callable[..., Any] = calls.commit_push

    def commit_push(request: pb.CommitPushRequest, timeouts: Any) -> Any:
        found.append(request)
        return real(request, timeouts)

    monkeypatch.setattr(calls, "commit_push", commit_push)
    return found


def _state(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    values = np.random.default_rng(1).standard_normal(200_000).astype(np.float32)
    values[:seed] = seed
    return {"w": values}


def test_each_way_commits_its_probes(client: Client, commits: list[pb.CommitPushRequest]) -> None:
    results = [
        client.push(_state(1), probes=PROBES, same_host="never"),
        client.push(_state(2), probes=PROBES, delta="require"),
        client.push(_state(3), probes=PROBES, delta="never", same_host="write"),
    ]
    assert [one.kind for one in results] == [PushKind.FULL, PushKind.DELTA, PushKind.FULL]
    assert results[2].way is TransferPath.SAME_HOST
    assert [one.probes for one in commits] == [PROBES.to_message()] * 3


def test_of_several_processes_the_first_alone_sends_them(
    client: Client, server: WeightSyncServer, commits: list[pb.CommitPushRequest]
) -> None:
    results: dict[int, PushResult] = {}

    def push(writer: int) -> None:
        with Client(server.address) as one:
            results[writer] = one.push(
                _state(4), probes=PROBES, writers=2, writer=writer, idempotency_key="both"
            )

    threads = [threading.Thread(target=push, args=(writer,)) for writer in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0].version == results[1].version
    assert {one.writer: one.HasField("probes") for one in commits} == {0: True, 1: False}


def test_a_gap_is_a_metric_by_version_and_lag(client: Client, server: WeightSyncServer) -> None:
    version = client.push(_state(5)).version
    newest = client.push(_state(6)).version
    assert client.report_logprobs(version, [-1.0, -2.0], [-1.5, -2.0]) == 2
    lag = str(newest - version)
    named = {"version": str(version), "lag": lag}
    assert scraped(server.log, "weightsync_logprob_gap", **named) == 0.25
    k3 = scraped(server.log, "weightsync_logprob_gap_k3", **named)
    assert k3 == pytest.approx((math.exp(-0.5) - 1 + 0.5) / 2)
    client.report_logprobs(version, [-1.0], [-1.0], trained_version=version)
    assert scraped(server.log, "weightsync_logprob_gap", version=str(version), lag="0") == 0
    assert scraped(server.log, "weightsync_logprob_tokens_total", model=client.model) == 3


_GAP: dict[str, Any] = {"version": 1, "tokens": 1, "sum_abs": 0.5, "sum_k3": 0.1, "max_abs": 0.5}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"version": 0}, "the version of a gap is 0, and model default has had none above"),
        ({"version": 9999}, "the version of a gap is 9999, and model default has had none above"),
        ({"tokens": 0}, "leave out version 1, or count its tokens: 0 is given"),
        ({"tokens": 1 << 60}, "leave out version 1, or count its tokens: 11529"),
        ({"sum_abs": -1.0}, "sum_abs of version 1 is -1.0, and must be finite and at least 0"),
        ({"sum_k3": math.nan}, "sum_k3 of version 1 is nan, and must be finite and at least 0"),
        ({"max_abs": math.inf}, "max_abs of version 1 is inf, and must be finite and at least 0"),
    ],
)
def test_what_cannot_be_is_refused_and_counts_nothing(
    client: Client, server: WeightSyncServer, changed: dict[str, Any], message: str
) -> None:
    client.push(_state(7))
    before = scraped(server.log, "weightsync_logprob_tokens_total")
    gaps = [pb.LogprobGap(**_GAP), pb.LogprobGap(**_GAP | changed)]
    (call,) = calls.report_logprobs("default", 0, gaps, client._link.timeouts)
    with pytest.raises(InvalidError) as caught:
        client._send(call)
    assert message in caught.value.message
    assert scraped(server.log, "weightsync_logprob_tokens_total") == before


def test_too_many_or_no_gaps_and_unknown_names_are_refused(client: Client) -> None:
    client.push(_state(8))
    for request, message in (
        (pb.ReportLogprobsRequest(model="default"), "give the gaps of 1 to 64 versions, not 0"),
        (
            pb.ReportLogprobsRequest(model="default", gaps=[pb.LogprobGap(**_GAP)] * 65),
            "give the gaps of 1 to 64 versions, not 65",
        ),
        (
            pb.ReportLogprobsRequest(
                model="default", trained_version=9999, gaps=[pb.LogprobGap(**_GAP)]
            ),
            "trained_version is 9999, and model default has had none above",
        ),
        (pb.ReportLogprobsRequest(model="other", gaps=[pb.LogprobGap(**_GAP)]), "other"),
    ):
        with pytest.raises(Exception, match=message):
            client._send(calls.Call("ReportLogprobs", request, 10, lambda _: None))
